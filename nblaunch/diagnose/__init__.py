"""Why a run failed or hangs. The only place that assigns blame; results and views show its verdict.

Two questions are answered here, both from facts that were collected elsewhere.

Which failure is the cause? `failures.blame` takes the states of the ranks, with a record of each failure. In
time order, the first one that does not blame a peer is the root cause; a rank that raised because a
connection was closed, a collective was aborted or a store went away failed as a consequence, whatever the
clocks say: the agent notices a killed rank up to one poll later than its peers notice the closed connection.
A process that ended without a message is explained by its signal, by what its stderr and faulthandler's file
hold, and by the kernel's count of OOM kills in its cgroup. A CUDA allocation that failed is explained by the
processes that hold that GPU's memory.

Which rank is waited for? `hang` takes each rank's `Where`: its stack, and the collectives in torch's flight
recorder with their sequence numbers. Ranks are compared group by group; a rank whose sequence number is
behind, or whose operation, sizes or dtypes differ, is named with the collective that the others are in.
`deadlock` does the same over all groups, with sends and receives: each rank's operation waits for the ranks
that are not in it, these are in other operations, and a part of this graph that leads back to itself is a
circle. A rank that computes, has finished or gives no answer may still come, so nobody is in a circle for
waiting for it.

Invariants:
  * No module asks a rank, waits, or uses a socket. The hub thread calls them, so all are quick.
  * The verdict depends on the records alone: the same records, in any order, name the same root cause.
  * If there is a failure there is a root cause. Where every rank blames a peer, it is the first process that
    ended without a message, else the first failure.
  * A reason is one line, and names no number that is not in the records or in the system's own count.

Modules, each after those that it imports:

    failures  root cause and consequences; why a process ended; CUDA out of memory
    deadlock  who waits for whom over all groups, and the circles among them
    hang      where the ranks are, in which collective, and which ranks have not started it
"""
