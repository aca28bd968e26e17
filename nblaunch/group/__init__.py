"""The worker group: N ranks under one agent, from the first fork to the last exit. It knows no client.

    any thread                 hub thread                   agent thread            each rank
                                 Hub: ROUTER socket, ipc      RankAgent               control thread: DEALER
        interrupt, where ─call─> WorkerGroup: events      <── attempt, exits, end
        reads job.state  <──────   step() -> actions      ──> release, restart, stop
                                   receives, sends <───────────── messages ─────────> main thread: the job

Messages, reports of the agent, requests of other threads (`hub.call`) and the clock (`tick`) become events,
on the hub thread, one after the other. `lifecycle.step(state, event, now)` decides, without I/O; the group
performs the actions. States are frozen, so any thread may read them. A run's group has one job, a session's
has many. The hub thread serves the clients, too. A thread of its own measures a job that takes longer than
0.1 s, and one reads the stacks of ranks that do not answer.

A job, from a cell to its value, across client, runtime and rank:
    place     options -> placement, environment           client > runtime   OpenRanks: before any rank starts
    prepare   a cell, a call, a script -> payloads        client             prepare_cell, prepare_call, ...
    submit    JobOrder -> Job, payloads held              client > runtime   run_job; launch, jobs, sessions
    begin     Prepare -> process group -> Entered(READY)  runtime > rank     until all ranks are ready
    dispatch  Dispatch [-> Arrived -> Proceed]            runtime > rank     a session's: on all or on none
    run       Started, output, Returned or Raised         rank > runtime > client: both fold them
    settle    all ranks final, or 0.1 s after a failure   runtime > rank     the agent stops others; Leave
    finish    job.ended -> JobEnd                         runtime > client   a session recovers ranks first
    collect   values unpickled, failures explained        client             the result, then the error

An interrupt (the user's, a handle's `cancel`; in a session also a timeout):
    ReportWhere to all, for 0.3 s at most: the error says where the ranks were
    Interrupt to every rank at work -> InterruptSeen: its grace period begins; C code is waited for
    from 0.25 s on, repeatedly: ReportWhere; a rank that waits for one that does not come: FreeCollective
      (gloo's connections are shut; NCCL is aborted on all ranks, unless a step is under way)
    the grace period is over: fresh ranks are stopped; a session's get the last Interrupt, 2 s later a restart
    a second interrupt by the user skips what is left
    recovery, in a session: if the group is fit, go on; else Recover forms the process group again, or the
      agent restarts all ranks; also after a job that succeeded, where ranks have called unlike numbers

A group knows its ranks as those of its hosts (`host.rank_host.GroupHost`), wherever they run. What makes
groups (`runtime.worker_groups`) gives them the function that makes these.

Invariants:
  * Every job ends, once. Each wait has a limit, or is shown to the user and can be interrupted.
  * A message counts only after `Hello` with the group's token, and only in the present attempt.
  * A rank's exit is folded after all that it sent; a message after the text written before it.
  * What a process has once, its `LocalRuntime` owns: made on first use, and ended in the order standby group,
    other groups, fork server, agent threads, hub, directory.

Modules, each after those that it imports:

    machine        base of the pure machines: a step, messages to ranks, surveys
    fitness        whether a group is fit for another job: evidence before health
    recovery       making ranks fit for another job; a pure machine
    locating       where the ranks are: asked, read from outside, and asked again; a pure machine
    ending         a job that does not end by itself: what follows from interrupts, timeout and hang; pure
    lifecycle      `step`: every decision on jobs and ranks, stage by stage
    job            one job: its state, values and log files
    group          `WorkerGroup`: makes events, performs actions
    standby        the group that is ready before it is needed
    local_runtime  `LocalRuntime`: the host that a runtime is, and its groups
"""
