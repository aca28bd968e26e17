"""Everything that runs inside a rank. torchelastic calls `run_rank` in a fresh fork of the fork server.

The main thread runs the job, as a script's would: signals, CUDA, asyncio and `input()` work there. The
control thread owns the rank's one socket, a ZMQ DEALER; it answers unless C code holds the interpreter.

    main thread: Rank.live()                   control thread: Link                        hub
      takes orders        <── inbox ────────────  Prepare, Dispatch, Recover, Leave    <──
      sends, never waits  ─── outbox ──────────>  all messages, in order               ──>
      runs the job        <── SIGINT ───────────  Interrupt                            <──
                          <── event ────────────  Proceed: the payload is complete     <──
                          <── queue ────────────  Answer to `input()`                  <──
      is looked at        <── stack, recorders ─  ReportWhere, ReportReached           <──
      is freed            <── abort, shutdown ──  FreeCollective, Abort                <──

The phases of its life, by the names that error messages use:
    fork            isolate: die with the server, own session, subreaper, default signals
    connect         streams into the log files; Hello with the token of the worker group
    process group   on Prepare: environment, directory, limits, device; the default process group
    ready           waits for a job (ranks of a standby group wait in `connect`, without Prepare)
    job             on Dispatch: Started, unpickle, run, wait for threads unless kept; Returned or Raised
    value transfer  packs the value, where only the last interrupt counts; then exit functions unless kept
    ...             a session's rank takes the next job; after a failed one first Recover -> Recovered
    leave           on Leave: threads, exit functions, process group, flush, exit code

An interrupt: the control thread sends SIGINT to the main thread only while a job is at work, and reports
`InterruptSeen` once the main thread has run Python code since: a rank in C code is not one that ignores it.
A collective, which cannot be, is aborted (NCCL) or cut off (gloo). With `Preempt` before it, the rank saves.

Invariants:
  * A rank ends when the hub sends Leave. One that failed stays until its peers have reported.
  * A job's payload is kept once it is whole on every rank of a session (`Arrived`, `Proceed`), or undone.
  * Whatever a job raises becomes `Raised`; a rank that cannot report it writes to stderr and exits 1.
  * The user's code sees what torchrun's would. Only this process is touched; its children end with it.

Modules, each after those that it imports:

    environment      the environment, directory, limits and device that a rank begins with
    modules          the notebook's own modules on another machine
    optimizer_steps  how many steps of optimizers a job has taken, and which a GPU still has to run
    flight_recorder  torch's flight recorders: which collectives were begun, and which are open
    isolate          the first thing after the fork; reaps orphans; standard library only
    memory           memory of host and GPU: what a job used, and who holds what when an allocation fails
    script           a script, module or program as the job
    stdio            stdout and stderr: log files, order, output of child processes; `input()`
    values           a value in few words, and as a payload
    in_place         groups formed again behind the same object, where torch can
    process_group    the default process group: formed, formed again, aborted, left
    preempt          what is called before the node is taken back
    stores           which variables a cell has bound, also to the object that they had
    shell            the IPython shell: cells, displays, progress bars, completion
    failure          an exception as a record, with the user's frames only
    namespace        the rank's variables: its own, the notebook's, and which of the two counts
    sketches         short numbers that tell later whether all ranks had a variable alike
    sharded          what of a save belongs to process groups: meshes, DTensors, models of FSDP2
    saving           the rank's part in saving a session's variables, and in loading them
    revival          variables for ranks that were started again, from the others
    waits            the operation in which the rank waits for others
    stacks           where the main thread is; frees a collective that it is stuck in
    control          the control thread: inbox, outbox, interrupts
    main             `Rank`: prepare, work, recover, leave
"""
