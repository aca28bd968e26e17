"""torchelastic and processes: who lives, who is which rank, and what is left behind (nothing).

torchelastic's own `LocalElasticAgent` supervises the ranks. `RankAgent` subclasses it to report what happens
and to bound every wait; when to restart and when to give up stays torch's decision. An agent runs on a thread
of its own, since on the main thread it would install signal handlers. It reports to its owner, a worker group
or a node, by the calls of `AgentEvents`, on its thread; the owner calls `release`, `restart`, `stop` and
others from any thread, which set a flag and wake the agent.

    runtime                            keeper: subreaper, no torch      fork server: torch loaded, no CUDA
      agent thread ── fork requests ─────────────────────────────────────> fork ──> rank, rank, ...
      any thread ──── orders ─────────> ping, sweep, start, end
      (both are socket pairs)            └─ waits for the end of the kernel, of the runtime and of the server

The keeper is started by `subprocess` (`nblaunch._keeper`), forks the server and outlives the kernel by a
moment. The runtime is forked by the server and adopted by the keeper, and so is a node program; the doctor,
which is a runtime to itself, has a keeper and a server of its own. A child of the keeper that is neither
server nor runtime does not live: it is killed when the agent orders it (`sweep`, at the end of each worker
group), when the fork server is gone, and when the runtime or the kernel is gone, however it ended; in the
last case the private directory goes too. A rank is a fork of the server, in a session of its own, and is
killed when the server ends.

A run on one machine has a rendezvous on the loopback interface; with `--nnodes` it is torch's c10d or static
rendezvous at an address that other nodes reach; what nodes write there is signed with the run's key.

Invariants:
  * The kernel is never forked. Its signal handlers, environment and start method are left as they are.
  * A rank that ends without having been released has failed, whatever its exit code.
  * A rank is ended by SIGTERM and, after the grace period, SIGKILL. Every wait for a process has a limit.
  * Before ranks on GPUs are killed, the owner has them abort NCCL (`ranks_ending`).
  * The fork server starts no thread, opens no CUDA context, and survives a fork that the system refuses.
  * Nothing listens but the rendezvous store; private files are in one directory of mode 0700.

This package, `rank/`, and the pickling of tensors use names of torch that are not public. Each module lists
its own, and `tests/unit/test_torch_names.py` lists which torch release lacks which.

Modules, each after those that it imports:

    descriptors        how many file descriptors a run needs; raises the soft limit
    hooks              torchelastic's events of a run; the watchdog of expiration timers; layouts of log files
    logs               reading log files as they grow, and bounding them
    placement          ranks, devices and backend for this machine; what it cannot do, by name
    preload            the fork server's own loop, and what its forks are given to call, by name
    settings           what an agent needs to know, and what it reports
    process_options    from options and environment to how processes start; what cannot be done, by name
    keeper             the keeper's own program
    rendezvous         from options to torch's rendezvous: configuration, stores, handlers
    directed           the rendezvous of nodes that an engine placed: the runtime decides it
    forkserver         reaches the fork server, or starts one; a multiprocessing context that forks from it
    agent              `RankAgent`, and the thread that it runs on
"""
