"""The IPython magics: from a line and a cell to a run, and from its result to the notebook's variables.

`%%distributed` parses its line, captures what the cell uses, and performs the job: on the ranks of the open
session if there is one, else on fresh ranks. `%distributed COMMAND` is one function for each command. Both
run on the main thread of the kernel, which draws the view and waits for the end; `--background` moves that
wait to a thread, and the cell returns a `Handle`.

    line, cell ──parse_line──> LaunchOptions ──> session open? ─┬─ no:  run_fresh ──┐
                                                                └─ yes: session.prepare_cell ┤
    user_ns[out], `_` <── perform_job <── Outcome(result, error) <───────────────────────────┘
    the error is raised last

Invariants:
  * All that can be wrong with a line or a cell is raised before a process starts.
  * The result reaches `_` and `--out` before the error is raised, whatever the outcome.
  * The magics decide nothing about ranks. They print what a user asked for; views show runs.
  * Only `%load_ext` installs anything in a shell: the magics, a completer, and for `auto` a transformer. It
    starts the runtime first, which loads torch while the user writes the first cell.
  * A cell is compiled under its own name and line numbers: a traceback shows the lines that the user wrote.

Modules, each after those that it imports:

    sessions    open sessions by name, and the one that a cell belongs to
    completion  what Tab offers beside options: sessions, hosts of an allocation, variables
    auto        `%distributed auto on`: the input transformer that puts `%%distributed` above each cell
    export      remembers what ran, and writes cells as a script
    commands    every `%distributed COMMAND`; performs a job and hands its result to the notebook
    magics      `%%distributed` and `%%local`; completion on rank 0; `register`
"""
