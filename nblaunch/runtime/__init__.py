"""The runtime: the process that has the hub, the agents and the jobs; kernels and scripts are its clients.

    client: kernel, script           keeper: subreaper, no torch, small
      boot ── starts ───────────────> ├─ fork server: torch, IPython's shell ── rank, rank, ...
       └─ link (a socket pair) ─────> └─ runtime: torch, torchelastic's agent, the worker groups

The keeper forks the fork server, which imports torch, forks the runtime, and only then loads what ranks need:
the two load the rest side by side, each on a core. The process between the server and the runtime ends at
once, and the keeper adopts the runtime. So a fork server that is killed takes its ranks along, and the
runtime, which knows the jobs, has another one started.

A runtime is bound to the kernel that has started it, or detached. Who ends with whom:
  * the kernel a runtime is bound to ends, however: the keeper ends all
  * the runtime ends or is killed: the keeper ends all; its log has been open in the client since the start
  * the fork server is killed: its ranks; the keeper sweeps, the runtime has another one started
  * the keeper is killed: all, by the signal that the system sends at the end of a parent
  * SIGUSR1 to the keeper ends all; SIGINT, SIGTERM and SIGHUP are ignored by all three

Its main thread waits for the end. The hub's thread does the rest, for ranks and clients alike: it folds what
ranks send, and passes on the same bytes to each client that watches the job. What would make it wait
(devices, ports, forks, exits) a thread of a pool does. A client that does not read is sent no folded messages
until it has caught up, and then the present state: no fold waits for a client. A client that ends takes no
job along.

Invariants:
  * The runtime is forked before anything starts a thread, and imports nothing that ranks do not need before.
  * Its directory is `/`, its umask 077: what depends on a kernel's comes with each job.
  * The jobs of a detached session are kept after their client has gone; of others, only what a result needs.
  * A session has one owner, which submits its jobs and answers its ranks. What would disturb it is refused to
  others.
  * What a job has printed is kept once: in its ranks' log files. Of all else its last state is kept.
  * A private log file of a rank is bounded, and given back as the jobs go that have written it.
  * Nothing listens but unix sockets of mode 0600 in the private directory of mode 0700.

Modules, each after those that it imports:

    place              where a run would be, and what cannot be done here, before a process starts
    worker_groups      worker groups: fresh ranks, a standby group in their place, a session's ranks
    connections        the sockets of clients, served by the hub's thread
    metrics_file       what a job logs, as lines of JSON in the user's file
    jobs               a client's job: what is held for it, who watches it, how it ends
    archive            the jobs that a session has had: records, states, values, and their bounds
    runtime_session    ranks that stay, their owner and those that follow them
    requests           one method for each request of a client
    runtime_main       from the fork to the end of the process
"""
