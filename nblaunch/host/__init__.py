"""A host: what a machine does with a group's ranks, from the keeper to the last exit. It knows no group.

torchelastic's own `LocalElasticAgent` supervises the ranks. `RankAgent` subclasses it to report what happens
and to bound every wait; when to restart and when to give up stays torch's decision. An agent runs on a thread
of its own, since on the main thread it would install signal handlers; a `RankHost` is that thread, and takes
the ranks' messages. To a worker group all its hosts are alike (`GroupHost`): it gives them orders, and they
report by the calls of `HostEvents`, on the hub's thread.

    runtime, or node program            keeper: subreaper, no torch      fork server: torch loaded, no CUDA
      agent thread ── fork requests ─────────────────────────────────────> fork ──> rank, rank, ...
      any thread ──── orders ─────────> ping, sweep, start, end                      │
      hub thread <─── messages of ranks, over a unix socket ─────────────────────────┘

A child of the keeper that is neither server nor runtime is killed when the agent orders it (`sweep`, at the
end of each worker group), when the fork server is gone, and when the runtime or the kernel is gone, however
it ended; in the last case the private directory goes too. A rank is a fork of the server, in a session of its
own, and is killed when the server ends. On another machine the same parts are in a node program. There the
owner of a `RankHost` is a relay, which sends over TCP what it is told: first new bytes of log files.

    runtime                                           node (this machine, too, with `--here`)
      Listener <──── TCP, CURVE: FromNode, ToNode ────> NodeHost, a NodeRelay for each group
      DataSocket ─── TCP, CURVE: pieces ──────────────> DataSocket ────> that of the next node

Invariants:
  * The kernel is never forked. Its signal handlers, environment and start method are left as they are.
  * A rank that ends without having been released has failed, whatever its exit code.
  * A rank is ended by SIGTERM and, after the grace period, SIGKILL. Every wait for a process has a limit.
  * Before ranks on GPUs are killed, the host has them abort NCCL (`ranks_ending`).
  * The fork server starts no thread, opens no CUDA context, and survives a fork that the system refuses.
  * Nothing listens but the rendezvous store and the listener; private files are in a directory of mode 0700.
  * `tests/unit/test_torch_names.py` lists torch's private names, and which release lacks which.

Modules, each after those that it imports:

    descriptors        how many file descriptors a run needs; raises the soft limit
    hooks              torchelastic's events of a run; the watchdog of expiration timers; layouts of log files
    logs               reading log files as they grow, and bounding them
    placement          ranks, devices and backend for this machine; what it cannot do, by name
    preload            the fork server's own loop, and what its forks are given to call, by name
    settings           what an agent needs to know, and what it reports
    wire               between the runtime and a node: the structs, and their encoding
    process_options    from options and environment to how processes start; what cannot be done, by name
    keeper             the keeper's own program
    rendezvous         from options to torch's rendezvous: configuration, stores, handlers
    directed           the rendezvous of nodes that an engine placed: the runtime decides it
    forkserver         reaches the fork server, or starts one; a multiprocessing context that forks from it
    agent              `RankAgent`, and the thread that it runs on
    hub                the ranks' socket and its thread
    process_stacks     the stacks of ranks that do not answer, or have died
    usage              CPU, memory and GPU of ranks, measured on a thread
    local_host         `LocalHost`: directory, fork server and hub of a process
    key                who may join: the run's key, and the command
    link               the runtime's socket for nodes, payloads in pieces, the sockets for pieces (TCP, CURVE)
    reach              which nodes reach each other, and why others do not
    code               the notebook's own modules on a node
    rank_host          `RankHost`: the ranks of one group on this machine; what a group says to any host
    relay              `NodeRelay`: between a node's ranks and the runtime
    join               the command, without torch: options, key, signals, exit status; has the program forked
    node_main          the node program, a fork of its fork server; `NodeHost`: its connection, and its relays
"""
