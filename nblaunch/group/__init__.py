"""The worker group: N ranks under one agent, from the first fork to the result. Works without a notebook.

    caller's thread            hub thread                   agent thread            each rank
      Waiter.wait                Hub: ROUTER socket, ipc      RankAgent               control thread: DEALER
        begin, interrupt ─call─> WorkerGroup: events      <── attempt, exits, end
        reads job.state  <──────   step() -> actions      ──> release, restart, stop
        draws the view             receives, sends <───────────── messages ─────────> main thread: the job

Messages, reports of the agent, requests of callers (`hub.call`) and the clock (`tick`) become events, on the
hub thread, one after the other. `lifecycle.step(state, event, now)` decides, without I/O; the group performs
the actions. States are frozen, so any thread may read them. A run's group has one job, a session's has many.

A job, from dispatch to result:
    place     options -> placement, environment           caller  place_launch: before any process starts
    prepare   a cell, a call, a script -> payload         caller  prepare_call, prepare_cell, prepare_script
    run       settings, a group, Prepare                  caller  run_fresh or a session; run_job, Waiter.wait
    begin     Prepare -> process group -> Entered(READY)  hub     until all ranks are ready
    dispatch  Dispatch [-> Arrived -> Proceed]            hub     a session's payload: on all ranks or none
    run       Started, output, Returned or Raised         hub     folded into job.state
    settle    all ranks final, or 0.1 s after a failure   hub     release: the agent stops the others; Leave
    finish    job.ended is set                            hub     a session recovers its ranks first
    collect   values unpickled, failures explained        caller  the result, then the error to raise

An interrupt (the user's, a handle's `cancel`; in a session also a timeout):
    Interrupt to every rank at work -> InterruptSeen: its grace period begins; C code is waited for
    from 0.25 s on, repeatedly: ReportWhere; a rank that waits for one that does not come: FreeCollective
      (gloo's connections are shut; NCCL is aborted on all ranks, unless a step is under way)
    the grace period is over: fresh ranks are stopped; a session's get the last Interrupt, 2 s later a restart
    a second interrupt by the user skips what is left
    recovery, in a session: if all sequence numbers agree, go on; else Recover forms the process group again,
      or the agent restarts all ranks

A group knows ranks that run elsewhere only as its `Peers`, a protocol in `group`. `launcher` and `session`
are given the function that connects them (`nodes.members.connect_peers`).

Invariants:
  * Every job ends, once. Each wait has a limit, or is shown to the user and can be interrupted.
  * A message counts only after `Hello` with the group's token, and only in the present attempt.
  * A rank's exit is folded after all that it sent; a message after the text written before it.
  * What a process has once, `runtime` owns: made on first use, not shared with a fork, and ended in the order
    standby group, other groups, fork server, agent threads, hub, directory.

Modules, each after those that it imports:

    hub         the socket and its thread
    inherited   what ranks inherit from this process: directory, umask, limits, environment; `Prepare`
    knowledge   which objects and names a session's ranks have
    stacks      asks ranks where they are; faulthandler for those that do not answer
    usage       CPU, memory and GPU of ranks, measured on a thread
    job         one job: its state, values and log files
    recovery    interrupts, and making ranks fit for another job: two pure machines
    result      a finished job as a result, and as the error to raise
    lifecycle   `step`: every decision on jobs and ranks, stage by stage
    group       `WorkerGroup`: makes events, performs actions
    standby     the group that is ready before it is needed
    wait        the caller's wait: drawing, prompts, timeout, interrupt, hang
    runtime     `LocalRuntime`: hub, fork server, directory, groups
    launcher    one job: place, prepare, run, collect
    scripts     a script as the job: found, or refused
    session     a group that stays: cells, calls, push, pull
"""
