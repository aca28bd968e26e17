"""The command line: `python -m nblaunch demo | doctor | sessions | logs | stop | join`."""

from __future__ import annotations

import argparse
import atexit
import os
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn


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
    doctor.add_argument("--nccl", action="store_true", help="also let all GPUs do an NCCL all_reduce")
    doctor.add_argument(
        "--on", metavar="ENGINE", help="check the nodes that ENGINE places; takes a run's options for nodes"
    )
    doctor.set_defaults(run=_doctor)
    listed = commands.add_parser("sessions", help="list the sessions of this user on this machine")
    listed.set_defaults(run=_sessions)
    logs = commands.add_parser("logs", help="print the output of a session's job")
    logs.add_argument("name")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the job ends")
    logs.add_argument("--job", type=int, metavar="N", help="the job of this number, not the last one")
    logs.set_defaults(run=_logs)
    stop = commands.add_parser("stop", help="end a detached session")
    stop.add_argument("name")
    stop.set_defaults(run=_stop)
    commands.add_parser("join", help="start ranks here for a notebook's run on several nodes", add_help=False)
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["join"]:
        # Its options are those of a run, with a parser of their own.
        return _join(words[1:])
    if words[:1] == ["doctor"] and any(each.startswith("--on") for each in words):
        return _doctor_of_nodes(words[1:])
    parsed = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = parsed.run
    return run(parsed)


def _demo(_: argparse.Namespace) -> int:
    from nblaunch._demo import demo

    return demo()


def _doctor(parsed: argparse.Namespace) -> int:
    from nblaunch.checks.doctor import doctor

    report = doctor(nccl=parsed.nccl)
    print(report)
    return 0 if report.ok else 1


def _doctor_of_nodes(words: Sequence[str]) -> int:
    from nblaunch._errors import OptionError
    from nblaunch.checks.nodes import check_nodes
    from nblaunch.options.command_line import parse_line

    try:
        report = check_nodes(parse_line(shlex.join(words)).options)
    except OptionError as error:
        print(error, file=sys.stderr)
        return 2
    print(report)
    return 0 if report.ok else 1


def _sessions(_: argparse.Namespace) -> int:
    from nblaunch._errors import NblaunchError
    from nblaunch._results import sessions_table
    from nblaunch.client import directory

    try:
        found = directory.sessions()
    except NblaunchError as error:
        print(error, file=sys.stderr)
        return 1
    print(sessions_table(found) or "no session is open")
    return 0


def _logs(parsed: argparse.Namespace) -> int:
    from nblaunch.view.shell_logs import logs

    return logs(parsed.name, follow=parsed.follow, job=parsed.job)


def _stop(parsed: argparse.Namespace) -> int:
    from nblaunch._errors import NblaunchError
    from nblaunch.client import directory

    try:
        directory.stop(parsed.name)
    except NblaunchError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"session {parsed.name!r} has ended")
    return 0


def _join(words: Sequence[str]) -> int:
    from nblaunch.host.join import join

    return join(words)


def _exit(status: int) -> NoReturn:
    """Exit; skip the interpreter's finalization if a check of the doctor still runs, or torch is loaded.

    The check's thread may be importing torch, and would crash. With torch loaded, finalization takes a second
    or more.
    """
    if "torch" in sys.modules or any(
        each.name.startswith("nblaunch-doctor") for each in threading.enumerate()
    ):
        atexit._run_exitfuncs()  # noqa: SLF001 - `os._exit` does not
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    _exit(main())
