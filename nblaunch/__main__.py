"""The command line: `python -m nblaunch demo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m nblaunch",
        description="Run notebook cells and functions on torch ranks.",
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser("demo", help="train a small model on two ranks and check the result")
    demo.set_defaults(run=_demo)
    run: Callable[[], int] = parser.parse_args(arguments).run
    return run()


def _demo() -> int:
    from nblaunch._demo import demo

    return demo()


if __name__ == "__main__":
    sys.exit(main())
