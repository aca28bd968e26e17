"""Runs and sessions on several machines: who places the nodes, and how a group reaches its ranks there.

Every node has its own agent, fork server and ranks, and one world spans them. With `--on` an engine places
the nodes, and the runtime is their rendezvous: the `director` decides which nodes take part in each attempt.
With `--rdzv-endpoint` users start them, and they join torch's rendezvous, in which the runtime's own agent
is a node, too. All else is the same: one listener, one admission, the same messages, host and relay.

An engine's thread asks it, starts node programs (`nblaunch.host.node_main`), and watches them.

A `NodeFleet` is an allocation with its nodes. A session holds one; a run on fresh ranks in that session is
another group on it, and needs no new allocation. A node that is admitted and reaches the others gets one
`OpenGroup` for each group, and one `CompleteRendezvous` for each attempt: its ranks, and the address of the
ranks' store.

At an endpoint a node finds the listener's address, and proves that it has the key before it gets its only
`OpenGroup`. Its agent then takes part in the rendezvous, and reads the number of the attempt there.

A worker group knows nodes only as a `host.rank_host.GroupHost`.

Invariants:
  * A node without the key, or with another protocol, Python or torch, is refused; the run goes on.
  * The runtime learns of a remote rank by the same messages and files as of a local one.
  * A rank's exit is reported after everything that the rank sent and printed.
  * A payload for several ranks of a node crosses the network once.
  * Both ends drop messages of an abandoned attempt.
  * A node ends by itself: with the run, with its connection, or after a signal. It leaves no process.
  * An allocation does not outlive its runtime: the keeper gives the nodes back, or a node of Slurm's does.
  * A cell costs the runtime 0.05 ms per node and rank, and the client 0.04 ms per rank. The runtime needs
    180 MB, 55 KB per node and 8 KB per rank (tests/benchmarks/bench_nodes.py).

Modules, each after those that it imports:

    versions     differences between nodes: refused, or a warning
    engine       the protocol of all engines, and options that contradict each other
    bootstrap    makes the notebook's environment on a node, and runs the node program in it
    process      nodes that are processes of this machine
    sync_env     what `bootstrap` is sent: the notebook's environment, and wheels that are fetched for it
    byhand       nodes that users start themselves (`--on join`)
    ssh          nodes on hosts that ssh reaches
    slurm        nodes of a Slurm allocation
    raydriver    the process that holds the connection to a Ray cluster
    ray          nodes of a Ray cluster
    director     pure: rendezvous, attempts, restarts, the end of a group
    asking       the thread that asks an engine, starts node programs and watches them
    members      the ranks on nodes: where each is, its log files and its values
    fleet        `NodeFleet`: the nodes of an allocation, or an endpoint, and the groups that they serve
"""
