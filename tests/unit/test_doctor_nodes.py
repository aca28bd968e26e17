"""What the doctor says of nodes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import nblaunch
from nblaunch import LaunchError, OptionError
from nblaunch.__main__ import main
from nblaunch.checks import nodes
from nblaunch.checks.node_rank import NodeReport
from nblaunch.checks.nodes import check_nodes
from nblaunch.options.launch import LaunchOptions


def found(gpus: list[str] | None = None, seconds: float = 0.002) -> NodeReport:
    return NodeReport(
        python="3.11.2", torch="2.13.0", glibc="2.36", gpus=gpus or [], backend="gloo", seconds=seconds
    )


class Result:
    def __init__(self, *warnings: str, **nodes: NodeReport) -> None:
        self.ranks = [SimpleNamespace(node=name, value=value) for name, value in nodes.items()]
        self.values = list(nodes.values())
        self.warnings = warnings

    def __len__(self) -> int:
        return len(self.ranks)


@pytest.fixture(name="checked")
def checked_fixture(monkeypatch):
    """Have runs end as a test says, and keep the options that they had."""
    seen = []

    def with_end(end):
        def run_fresh(_launch, _view):
            def unwrap():
                if isinstance(end, Exception):
                    raise end
                return end

            return SimpleNamespace(unwrap=unwrap)

        def prepare_call(_fn, _args, _kwargs, options):
            seen.append(options)
            return SimpleNamespace(backend="gloo")

        monkeypatch.setattr(nodes, "run_fresh", run_fresh)
        monkeypatch.setattr(nodes, "prepare_call", prepare_call)
        return seen

    return with_end


def test_each_host_has_a_line_and_so_has_their_group(checked):
    seen = checked(
        Result("NCCL 2.27.3: hA; 2.27.5: hB.", hA=found(gpus=["H200", "H200"]), hB=found(seconds=0.1))
    )
    report = nblaunch.doctor(on="slurm", nnodes=2, slurm="-p gpu")
    assert str(report).splitlines() == [
        "nblaunch doctor: 0 problems, 1 warning",
        "ok       hA     Python 3.11.2, torch 2.13.0, glibc 2.36, 2 x H200",
        "ok       hB     Python 3.11.2, torch 2.13.0, glibc 2.36, no GPU",
        "warning  nodes  NCCL 2.27.3: hA; 2.27.5: hB.",
        "ok       group  2 ranks on 2 nodes over gloo: an all_reduce takes 100.0 ms",
    ]
    assert [(each.on, each.nnodes, each.slurm, each.nproc_per_node) for each in seen] == [
        ("slurm", "2", "-p gpu", 1)
    ]


def test_each_line_of_what_goes_wrong_is_a_problem(checked):
    checked(LaunchError("hA does not reach hB at 10.0.0.3\nhB does not reach hC", phase="engine"))
    report = check_nodes(LaunchOptions.from_keywords(on="process", nnodes=2))
    assert [each.summary for each in report.problems] == [
        "hA does not reach hB at 10.0.0.3",
        "hB does not reach hC",
    ]
    assert not report.ok


def test_a_wrong_option_is_raised(checked):
    checked(OptionError("no such engine"))
    with pytest.raises(OptionError, match="no such engine"):
        nblaunch.doctor(on="process")
    with pytest.raises(OptionError, match="Add on="):
        nblaunch.doctor(nnodes=2)


def test_the_command_line_takes_the_options_of_a_run(checked, capsys):
    seen = checked(Result(hA=found()))
    assert main(["doctor", "--on", "slurm", "--slurm", "-p gpu", "-n", "4"]) == 0
    assert (seen[0].on, seen[0].slurm, seen[0].nproc_per_node) == ("slurm", "-p gpu", 4)
    assert "ok       hA " in capsys.readouterr().out
    checked(LaunchError("nobody came", phase="engine"))
    assert main(["doctor", "--on=process"]) == 1
    assert "nobody came" in capsys.readouterr().out
    assert main(["doctor", "--on=nothing"]) == 2
