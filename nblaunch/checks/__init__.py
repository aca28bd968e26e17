"""The doctor: what would go wrong on this machine, found before a run needs it.

A check is a function that yields findings; a finding is a level (ok, warning, problem), a name, one line of
fact and one of advice. `doctor()` runs all checks at the same time, each on a daemon thread of its own with a
time limit of its own, because what they look at may not answer: a resolver, a driver, a network disk. A check
that raises or overruns its time becomes a warning that names it; its thread is abandoned.

    doctor() ─┬─ threads: limits, memory, shared memory, temporary directory, front end, versions
              ├─ threads: torch, fork server, process control, hand-over, loopback, hostname
              ├─ threads: GPUs ── processes: nvidia-smi, nvml.py
              └─ --nccl, when the others have finished ── one process for each GPU: nccl_rank.py
    doctor --on ── a run on nodes, one rank on each: node_rank.py

Invariants:
  * The calling process gets no CUDA context, no driver library and no signal handler. What touches a driver
    is a process of its own, which can be abandoned.
  * What checks fork, and the files that they make, belong to a runtime and a directory of the doctor's own
    (`DoctorRuntime`), and are gone with it, also when a check raises or is interrupted. The process's own
    runtime is described if there is one, and never started.
  * A machine without a GPU, or with a torch that cannot be imported, gets a report, not an exception; without
    `--nccl` within 5 seconds.
  * Nothing here starts a worker group, except `--on`, which does nothing else. What fails in the all_reduce
    of `--nccl` is NCCL's doing, not nblaunch's.
  * The same fact has the same words in the notebook, in Python and on the command line (`DoctorReport`).

Modules, each after those that it imports:

    nccl_rank    one rank of the all_reduce; a program of its own
    node_rank    what a rank on a node reports
    nvml         NVML and the kernel's log as JSON; a program of its own, standard library only
    report       findings, and how a report is shown
    own_runtime  the doctor's own runtime and directory; the runtime of this process
    resources    files, processes, memory, threads, shared memory, temporary directory, leftovers
    detached     what would end a detached session: its control group, logind
    notebook     front end and versions
    processes    torch's build, and what ranks are made of: fork server, signals, hand-over, network
    gpu          GPUs by nvidia-smi and NVML: compute mode, memory errors, architecture, links
    nccl         an all_reduce over all GPUs, bounded in time
    nodes        nodes that an engine places: a run that checks them
    doctor       the list of checks; runs them, and collects what they found
"""
