"""Cells as a script for torchrun: what ran in the notebook, without the notebook.

The user names cells; the result is one Python file, `main()` and what it needs above it, that `torchrun` runs
on the same number of ranks, plus a directory of data where values have no literal. Everything happens on the
calling thread, when `%distributed export` or `--export` asks for it. No rank takes part.

    cells ──plain Python──> names they need ──Collector──> imports, definitions, literals, files
                                                                   │
    text of the script <── _ScriptWriter <── split: what goes above main, what into it

For each name the collector takes the first that applies: an import that the notebook ran; the source text of
a function or class, and in turn what that needs; a literal, if a person would write one; a file beside the
script (arrays, tensors, all else pickled). Where a definition made again would not be what it is by now, what
differs is set below it, or the function or class itself is in a file. A value that can be none of these is
refused by name, unless the cells may never use it: then the command reports that it was left out.

Invariants:
  * The script imports nothing of nblaunch, and nothing that the cells do not use.
  * The notebook's namespace is read, never changed.
  * Code is copied as the user wrote it, comments included. It is edited only where a script differs from a
    cell: magics and `!` become calls, a last expression is printed, `await` gets a loop.
  * A file that was not exported by nblaunch is never overwritten without `--force`.
  * The same cells and values give the same text.
  * Exporting runs no code of the user's, but for what pickling runs anyway.
  * What is one object, or one memory, in the notebook is one in the script.

Modules, each after those that it imports:

    imports      import statements: which the notebook ran, which a value needs, how they are written
    literals     values as source: numbers, texts, containers, paths, devices, settings
    files        values in files: arrays, tensors, everything else pickled
    source       where functions and classes are defined; cells as plain Python text
    expressions  what an expression gives now, without running anybody's code
    drift        where a definition made again would not be what it is by now
    effects      what a definition changes when it is made again: registries, counters
    collect      follows names to all that they need, in an order in which it can be defined
    writer       splits the cells between the top and `main`, and writes the file
"""
