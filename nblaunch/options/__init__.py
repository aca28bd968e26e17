"""The options of a launch: one table that magics, `run()`, `Session`, `PET_` variables and docs share.

Theory of operation. A field of `launch.LaunchOptions` is a row of the table. Its columns (`table.Option`)
say how the option is spelled, what values it takes (`kinds.Kind`), what it belongs to (`Scope`: a cell, the
worker group, a node, ...) and what torchrun has of it. All else is read off the table:

* `LaunchOptions.from_keywords` checks keywords; `line.parse_line` reads the line of a magic with argparse.
  Either checks a value once, under the name that the user wrote, and then asks the `PET_` variables.
* The README's table, the help of the magics, completion and suggestions list its rows.
* A session's cells may change what is of a cell, and take the session's value otherwise (`launch.within`);
  `nblaunch join` takes what is of a node or of the rendezvous.
* `torchrun.torchrun_command` writes the torchrun command that is equivalent to some options.

To add an option add a field. No list of options is kept elsewhere; a test reads the package for one.
"""
