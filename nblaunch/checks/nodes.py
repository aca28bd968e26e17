"""The doctor's check of other machines: it asks for nodes, compares them, tries them, and gives them back.

Every run on nodes begins in this way. So the check is a run whose job only reports: what stops it would stop
every run, with the same error.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from nblaunch import _notebook
from nblaunch._errors import NblaunchError, OptionError
from nblaunch._results import RunResult
from nblaunch.checks.node_rank import report_node
from nblaunch.checks.report import DoctorReport, Finding, Level, count_of, ok, warning
from nblaunch.client.preparation import prepare_call
from nblaunch.client.run import SilentView, run_fresh
from nblaunch.options.launch import LaunchOptions
from nblaunch.view.display import view_of

_NAME = "nodes"
_LINES = 20


def check_nodes(options: LaunchOptions) -> DoctorReport:
    """Check the nodes that `--on` names, with one rank on each unless another number is given.

    It takes as long as the engine needs to grant them; an interrupt withdraws the request. Raises
    `OptionError` if options contradict each other; any other error becomes a problem in the report.
    """
    if options.nproc_per_node == LaunchOptions().nproc_per_node:
        options = replace(options, nproc_per_node=1)
    started = time.monotonic()
    findings = tuple(_findings(options))
    return DoctorReport(findings, time.monotonic() - started)


def _findings(options: LaunchOptions) -> Iterator[Finding]:
    job = prepare_call(report_node, (), None, options)
    title = f"the doctor's look at nodes (--on {options.on})"
    shown = _notebook.shell() is not None
    try:
        result = run_fresh(job, view_of(title, job.backend) if shown else SilentView()).unwrap()
    except OptionError:
        raise
    except NblaunchError as error:
        for line in str(error).splitlines()[:_LINES]:
            yield Finding(_NAME, Level.PROBLEM, line)
        return
    yield from _of_result(result)


def _of_result(result: RunResult) -> Iterator[Finding]:
    """Yield a finding for each host, each warning, and the group of all ranks."""
    hosts = {each.node: each.value for each in result.ranks}
    for host, found in hosts.items():
        gpus = [f"{count} x {model}" for model, count in Counter(found["gpus"]).items()]
        have = [f"Python {found['python']}", f"torch {found['torch']}", f"glibc {found['glibc']}"]
        yield ok(host, ", ".join([*have, *(gpus or ["no GPU"])]))
    for text in result.warnings:
        yield warning(_NAME, text)
    backends = ", ".join(sorted({each["backend"] for each in result.values}))
    slowest = max(each["seconds"] for each in result.values)
    ranks, nodes = count_of(len(result), "rank"), count_of(len(hosts), "node")
    yield ok("group", f"{ranks} on {nodes} over {backends}: an all_reduce takes {1000 * slowest:.1f} ms")
