"""The command line: `python -m nblaunch demo | doctor`."""

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
    doctor = commands.add_parser("doctor", help="look for what would make runs fail, hang or crawl here")
    doctor.set_defaults(run=_doctor)
    run: Callable[[], int] = parser.parse_args(arguments).run
    return run()


def _demo() -> int:
    from nblaunch._demo import demo

    return demo()


def _doctor() -> int:
    from nblaunch.diagnose.doctor import doctor

    report = doctor()
    print(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
