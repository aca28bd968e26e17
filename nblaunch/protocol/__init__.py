"""The messages between processes, and the pure folds over them. Nothing here does I/O or reads a clock.

A rank sends `FromRank`, and receives `ToRank`. The runtime adds what it sees of a rank itself: `AboutRank` (a
process that exited, text in a log file, a measurement). It passes on to clients what has changed a state.

    rank ── FromRank ──> runtime: advance(state, message) ──> RunState ──> decisions on the group
         <── ToRank ───    │  ^
                           │  └── AboutRank: the runtime's own observations
                           └─ the same ─> client: advance(state, message) ──> RunState ──> views, result

`RunState` is all that is known of a run: for each rank its state, phase, output, value or failure, and every
attempt of the worker group. It is frozen, so any thread may read it without a lock; one thread
replaces it: the runtime's hub, the client's that waits. Views and results read nothing else.

Invariants:
  * `advance` is total. It accepts every message in every order, twice or late, from any rank, and returns a
    state; what is final for a rank (SUCCEEDED, FAILED, STOPPED, LOST) never changes within an attempt.
  * A message is one frozen struct in MessagePack, tagged by its type. Decoding never unpickles: a pickle
    travels as bytes inside `Payload`, and is opened only after the hub has authenticated its sender.
  * Times come inside messages. A fold of the same messages gives the same state, in another process too: only
    messages change a job's state, and those that do are published (`Job.listeners`) in the order of the fold.
  * Output has two sources, a text file for each stream and messages beside it. `Offsets` in a message say how
    many bytes of each file precede it; that is how the order is restored.
  * Every change of a message raises `PROTOCOL_VERSION`.

Modules, each after those that it imports:

    messages    between the runtime and its ranks: the structs, and their encoding
    variables   what is known of the variables of ranks, by numbers that are the same for values that are
    metrics     what ranks have logged: an append-only log that shares all it has
    ranks       a set of ranks, and a mapping by rank, for thousands of them
    reports     `HangReport`, where the ranks of a run were at one moment; ranks, frames and sizes as text
    transcript  one rank's output, bounded: its beginning, its end, and the amount between
    state       `RunState` and `advance`, the fold, and how both travel; `View`, which shows its states
    client      between the runtime and its clients: requests, answers, events
    framing     the header before each of these, and frames out of bytes
"""
