"""Runs on several machines: what the runtime and a node, `python -m nblaunch join`, exchange.

The worker group of a run has one node of its own, and with `--nnodes` those that join. Every node has its own
agent, fork server and ranks; torch's rendezvous gives them one world. The runtime's agent alone decides
about restarts and membership changes; a node's agent follows it. A node is a runtime to itself.

    runtime                                           node
      agent thread ──────── torch's rendezvous ────────── agent thread
      hub thread                                          hub thread ── ipc ── ranks
        Nodes, Listener <── TCP, CURVE: FromNode, ToNode ──> NodeRelay
        WorkerGroup                                       main thread: signals, exit status

A worker group knows other nodes only as `group.group.Peers`. `connect_peers` makes them: `runtime.launch`
gives it to each group. It reads or makes the run's key, remarks the command that joins, which the client
prints, and opens the listener. The group sends through its peers the messages for ranks elsewhere, and the
orders that its own agent gets; `Nodes` reports by the calls of `NodeEvents`, as the agent does by
`AgentEvents`.

`join` proves that it has the run's key before it joins the rendezvous, so a stranger disturbs nobody: it
reads the listener's address from the rendezvous store, connects with CURVE, sends `Joining`, and gets
`Welcome` with the settings of the run, or `Refused` with a reason. Then `NodeRelay` is a member of the hub,
as a worker group is: it sends on what its ranks send, new bytes of their log files before each message, and
values in pieces; messages from the runtime go to its ranks with this machine's environment, directory and
devices filled in.

Invariants:
  * A node without the key, or with another protocol, Python or torch, is refused; the run goes on.
  * What the runtime knows of a remote rank, it knows in the same messages and files as of a local one.
  * A rank's exit is reported after all that it has sent and printed.
  * A payload for several ranks of a node crosses the network once.
  * Messages of an attempt that has been given up are dropped at both ends.
  * The node ends by itself: with the run (status 0 if it succeeded), with the connection, or after a signal,
    for which the runtime first goes on without it; a second signal ends it at once. It leaves no process.

The rendezvous is `elastic.rendezvous`: the agents make it, and only that package imports torchelastic.

Modules, each after those that it imports:

    messages  between the runtime and a node: the structs, and their encoding
    key       who may join: the run's key, the versions, and the command
    transfer  payloads in pieces, to and from another machine
    listener  the runtime's socket for nodes (TCP, CURVE)
    members   `connect_peers`; the nodes that have joined, and their ranks
    node      `NodeRelay`: between a node's ranks and the runtime
    join      the command: options, key, admission, signals, exit status; main thread
"""
