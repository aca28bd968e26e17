"""The options of a launch: one table, which everything that takes or shows options reads.

An option is one field of `LaunchOptions`. Its `option(...)` has a column for all there is to know of it: the
spellings on a magic's line, the keywords of `run()` and `Session`, its PET_ variable, what a value may be,
its help text, what it belongs to (a cell, a group, a node, a script ...), and what torchrun has of it. Help
texts, the documentation's tables, completion, the torchrun command of an export, and the refusal of an
unknown spelling with the nearest known one are computed from these columns.

    line of a magic ───> parse_line ──────┐
    keywords of run() ──> from_keywords ──┼──> Kind.check, value by value ──> LaunchOptions (frozen)
    PET_ variables ───────────────────────┘     the first wrong one: OptionError

Invariants:
  * An explicit option beats its environment variable, which beats the default.
  * Of an option given twice the last one counts; `--env` and `--pull` add up.
  * `LaunchOptions` holds checked values in their final form. It can be pickled, compared and hashed, and
    `to_line` writes it as a line that parses to an equal one.
  * An error names what was asked, what is true, and what to do. Nothing here prints or exits.
  * Values are judged without this machine. Whether it has the GPUs, the port or the handler is decided when
    ranks are placed (`nblaunch.host`, `nblaunch.group`).

Names and meanings are those of torchrun wherever torchrun has the option.

Modules, each after those that it imports:

    kinds         what a value may be: numbers, seconds, choices, endpoints, variables; one `Kind` for each
    table         one row and its columns; lookup of the nearest name; the table as Markdown and as help
    launch        `LaunchOptions`, the table itself
    command_line  a magic's line, parsed by argparse; its help and its completion; the torchrun command that
                  starts a script with the same options
"""
