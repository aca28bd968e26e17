"""`--metrics-file`: what ranks log, as lines of JSON, while they run and whoever follows them."""

from __future__ import annotations

import json
import math
import os
import re

import pytest

import nblaunch
from nblaunch import OptionError
from nblaunch.client import directory

pytestmark = pytest.mark.timeout(300)


def lines(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def train(steps, gate=None):
    """Log steps; between the first half and the second one wait for a file."""
    import time

    for step in range(steps):
        if gate is not None and step == steps // 2:
            while not gate.exists():
                time.sleep(0.01)
        nblaunch.log(step=step, loss=1 / (step + 1), bad=[math.nan, math.inf, -math.inf][step % 3])


def test_the_file_is_complete_with_the_result_and_is_plain_json(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = nblaunch.run(train, (6,), nproc=2, metrics_file="deep/metrics.jsonl")
    found = lines(tmp_path / "deep" / "metrics.jsonl")
    assert len(found) == 24 == len(result.metrics)
    assert list(found[0]) == ["rank", "step", "time", "name", "value"]
    mine = [each["value"] for each in found if (each["rank"], each["name"]) == (1, "bad")]
    assert mine == ["NaN", "Infinity", "-Infinity"] * 2
    assert [repr(float(value)) for value in mine[:3]] == ["nan", "inf", "-inf"]
    assert [(each["rank"], each["step"], each["time"], each["name"]) for each in found] == [
        (each.rank, each.step, each.time, each.name) for each in result.metrics
    ]
    # Another run adds to it.
    nblaunch.run(train, (1,), nproc=1, metrics_file="deep/metrics.jsonl")
    assert len(lines(tmp_path / "deep" / "metrics.jsonl")) == 26


def test_lines_are_there_while_the_run_lasts_in_a_session_and_in_the_background(tmp_path, eventually, free):
    file = tmp_path / "metrics.jsonl"
    with nblaunch.Session(2, name="files", metrics_file=str(file)) as session:
        session.run(train, (4,))
        assert len(lines(file)) == 16
        session.run(print)
        assert len(lines(file)) == 16
        handle = session.submit(train, (4, free))
        eventually(lambda: len(lines(file)) == 24, "half of what runs in the background is written")
        assert not handle.done()
        free.touch()
        assert len(handle.result(60).metrics) == 16
        assert len(lines(file)) == 32


@pytest.mark.slow
def test_the_file_is_complete_when_the_kernel_of_a_detached_session_dies(
    tmp_path, detached_kernels, eventually, free
):
    kernel, file = detached_kernels(), tmp_path / "metrics.jsonl"
    kernel.ok("%distributed start -n 2 --detach --session train")
    kernel.submit(f"""
%%distributed --metrics-file {file}
import time, nblaunch
from pathlib import Path
nblaunch.log(step=0, loss=1.0)
while not Path({str(free)!r}).exists():
    time.sleep(0.01)
for step in range(1, 50):
    nblaunch.log(step=step, loss=1.0)
""")
    eventually(lambda: file.exists() and len(lines(file)) == 2, "the first lines are written")
    kernel.kill()
    eventually(lambda: directory.sessions()[0].client is None, "the client has gone")
    free.touch()
    eventually(lambda: len(lines(file)) == 100, "all is written, though no client is there")
    other = detached_kernels()
    other.ok("%distributed attach")
    # And who comes later has every point, too.
    other.ok("import nblaunch; job = nblaunch.Session.attach('train').jobs[-1]; found = job.result()")
    assert other.value("len(found.metrics)") == 100


@pytest.mark.parametrize("where", ["directory", "file", "nowhere"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_starts(tmp_path, where):
    (tmp_path / "taken").touch()
    path = {"directory": tmp_path, "file": tmp_path / "taken" / "m", "nowhere": "/proc/none/m"}[where]
    with pytest.raises(OptionError, match=rf"metrics_file.*{re.escape(str(path))}.*Give"):
        nblaunch.run(os._exit, (1,), nproc=1, metrics_file=str(path))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device here")  # noqa: PTH110
def test_a_full_disk_loses_lines_with_a_warning_and_not_the_run():
    result = nblaunch.run(train, (4,), nproc=2, metrics_file="/dev/full")
    assert result.ok
    assert len(result.metrics) == 16
    assert any(re.search(r"/dev/full' is not complete: No space left", each) for each in result.warnings)
