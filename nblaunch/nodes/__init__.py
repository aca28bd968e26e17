"""Ranks on other machines: the program that a user starts there, `python -m nblaunch join`.

The kernel's worker group has one node of its own, and with `--nnodes` those that join. Every node has its own
agent, fork server and ranks; torch's rendezvous gives them one world. The kernel's agent alone decides about
restarts and membership changes; a node's agent follows it.

    kernel                                            node (this package)
      agent thread ──────── torch's rendezvous ────────── agent thread
      hub thread                                          hub thread ── ipc ── ranks
        group.listener <── TCP, CURVE: FromNode, ToNode ──> NodeRelay
        group.members                                     main thread: signals, exit status

`join` proves that it has the run's key before it joins the rendezvous, so a stranger disturbs nobody: it
reads the listener's address from the rendezvous store, connects with CURVE, sends `Joining`, and gets
`Welcome` with the settings of the run, or `Refused` with a reason. Then `NodeRelay` is a hub's member as a
worker group is one: it passes on what its ranks send, new bytes of their log files before each message, and
values in pieces; orders from the kernel go to its ranks with this machine's environment, directory and
devices filled in.

Invariants:
  * What the kernel knows of a remote rank, it knows in the same messages and files as of a local one.
  * A rank's exit is reported after all that it has sent and printed.
  * A payload for several ranks of a node crosses the network once.
  * Messages of an attempt that has been given up are dropped at both ends.
  * The node ends by itself: with the run (status 0 if it succeeded), with the connection, or after a signal,
    for which the kernel first goes on without it; a second signal ends it at once. It leaves no process.

The kernel's side of this is `group.listener`, `group.members` and `elastic.rendezvous`.

Modules, each after those that it imports:

    node  `NodeRelay`: this node's ranks to the kernel, and its orders to them; hub thread and agent thread
    join  the command: options, key, admission, signals, exit status; main thread
"""
