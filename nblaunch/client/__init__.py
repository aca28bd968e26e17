"""The side of the kernel, the script and the command line: what submits jobs to a runtime, and follows them.

    caller's thread                                        runtime, a process of its own
      start     Boot ─── keeper: fork server, runtime ───>   `link`, a socket pair, is the first line
      place     OpenRanks ───────────────────────────────>   ranks, devices, backend; or an error
      capture   a cell, a call or a script becomes payloads, written to memory files
      submit    SubmitJob, with a JobOrder ──────────────>   holds the payloads, then Submitted; or Stale
      wait      folds, draws, asks the user  <────────────   folded messages, Question, JobEnded
      collect   maps the values, explains the failures; Taken: the runtime lets the values go
      raise     the error, once the result is there

Client and runtime fold the same messages in the same order (`protocol.state.advance`), so both have the same
`RunState`. What a rank has sent reaches a client as the rank has encoded it.

A line is one connection, for one thread at a time. No thread reads for others: who waits, polls. The link is
for short requests, under a lock. A job on fresh ranks has a line, and so has a session as long as it is open;
between two jobs its events (names, other ranks, its end) are taken at the next call. Finalizers send notes,
which are datagrams: they take no lock and wait for nothing.

The stop button raises KeyboardInterrupt in the wait, which sends `InterruptJob` and goes on. The second one
ends the ranks. SIGINT is held back while a line is read or written and while a message is folded.

A runtime that ends closes the line: the wait raises `LaunchError` with the last words of its log, and the
next run starts another runtime. At the end of the program the client stops its runtime, and waits for it.

Invariants:
  * A client knows the runtime by the protocol alone: it imports neither it nor what it is made of (`group`,
    `elastic`, `nodes`, `rank`), and neither torch nor zmq. The keeper is started by name.
  * Nothing waits when a runtime is started. One that cannot start ends the link, and its log says why.
  * What a process has once, `local` keeps. A fork of the process begins with nothing, and ends nothing.
  * What ranks know of the notebook changes at the moment at which they do: when a payload is on all of them.
  * A process is named by its number and its start, so none that has the number later gets a signal.

Modules, each after those that it imports:

    knowledge          which objects and names a session's ranks have
    line               one connection: requests, answers, what comes unasked; interrupts leave it whole
    code_manifest      the notebook's own modules, for other machines: files by content
    packages           the notebook's Python environment, for other machines: exact versions
    local              what a process has once: its runtime, lines, notes; end of the process, forks
    directory          the sessions of this user, from the registry and from their runtimes; ends one
    preparation        a job: what ranks inherit and are sent, its fold, its end; one on fresh ranks is placed
    scripts            a script as the job: found, or refused
    result             a finished job as a result, and as the error to raise
    facts              what the report of a finished job is made of
    run                one job, from its capture to its `Outcome`: the wait draws, asks and interrupts
    session            ranks that stay: cells, calls, push, pull
    saves              saves of a session, and sessions that begin with one
"""
