"""What libraries log becomes points while a job runs, once, and leaves the libraries as they were."""

from __future__ import annotations

import functools
import importlib
import io
import os
import sys
import threading
import types
from typing import Any

import pytest
import torch
import tqdm  # type: ignore[import-untyped]

from nblaunch.probes import loggers, steps

LATE = "library_of_the_test.inner"


class Recorded:
    """Stands for `probes.rank_metrics`: keeps the points, and knows the names."""

    def __init__(self):
        self.points, self.earlier = [], 0

    def log(self, step, values):
        self.points += [(step, name, value) for name, value in values.items()]

    def names(self):
        return {name for _, name, _ in self.points[self.earlier :]}

    def reading(self):
        """Begin a job: names are counted anew."""
        self.earlier = len(self.points)
        return loggers.reading(self.log, self.names)


@pytest.fixture
def recorded():
    """Give a recorder; whatever the test does, the libraries are as before."""
    before = vars(tqdm.std.tqdm)["set_postfix"], list(sys.meta_path)
    yield Recorded()
    assert (vars(tqdm.std.tqdm)["set_postfix"], list(sys.meta_path)) == before
    assert loggers._points is None
    assert loggers._wrapped == []


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Give a library that has not been imported, and of which one method is known."""
    package = tmp_path / "library_of_the_test"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "inner.py").write_text("class Handler:\n    def on_log(self, **values):\n        return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setitem(loggers._METHODS, LATE, ("Handler", "on_log", lambda _handler, **values: (3, values)))
    yield LATE
    for name in (LATE, "library_of_the_test"):
        sys.modules.pop(name, None)
    sys.path_importer_cache.pop(str(tmp_path), None)
    sys.path_importer_cache.pop(str(package), None)


@pytest.fixture
def bar(monkeypatch):
    """Give `bar(values)`: a bar over three numbers, with a postfix made of each."""
    # What tqdm makes for the first bar of a process: a thread, and a lock of multiprocessing's.
    monkeypatch.setattr(tqdm.std.tqdm, "monitor_interval", 0)
    monkeypatch.setattr(tqdm.std.tqdm, "_lock", threading.RLock(), raising=False)

    def bar(values, **options):
        shown = tqdm.tqdm(range(3), file=io.StringIO(), **options)
        for number in shown:
            shown.set_postfix(**values(number))

    return bar


def test_numbers_of_a_bar_become_points_also_as_text_and_on_a_bar_that_is_switched_off(recorded, bar):
    with recorded.reading():
        bar(lambda number: {"loss": number, "lr": f"{number / 2:.1e}", "phase": "warm"})
        bar(lambda number: {"loss": torch.tensor([number]), "many": torch.ones(2), "j": 1j}, disable=True)
    assert [(step, name, float(value)) for step, name, value in recorded.points] == [
        *((0, "loss", 0), (0, "lr", 0)),
        *((1, "loss", 1), (1, "lr", 0.5)),
        *((2, "loss", 2), (2, "lr", 1)),
        *((3, "loss", 0), (4, "loss", 1), (5, "loss", 2)),
    ]


def test_a_bars_points_are_at_the_programs_own_steps(recorded, bar):
    def values(number):
        steps.begin(10 + number)
        return {"loss": 0}

    with recorded.reading():
        bar(values)
    steps.end_job()
    assert [step for step, _, _ in recorded.points] == [10, 11, 12]


def test_what_the_program_logs_itself_is_taken_from_no_bar(recorded, bar):
    def values(number):
        if number:
            recorded.log(number - 1, {"loss": "its own"})  # behind the postfix of the step before
        return {"loss": 0, "lr": 1}

    with recorded.reading():
        bar(values)
    assert [value for _, name, value in recorded.points if name == "loss"] == ["its own"] * 2
    assert [step for step, name, _ in recorded.points if name == "lr"] == [0, 1, 2]


def test_bars_that_libraries_draw_are_not_read(recorded, bar):
    theirs: dict[str, Any] = {"__name__": "lightning.pytorch.callbacks.progress.tqdm_progress"}
    exec("def call(method): method(loss=1)", theirs)  # noqa: S102 - a function of that module's
    with recorded.reading():
        bar(lambda number: {"step": number})
        theirs["call"](tqdm.tqdm(disable=True).set_postfix)
    assert recorded.names() == {"step"}


def test_what_is_no_curve_is_left_out():
    logs = {
        **dict.fromkeys(("loss", "grad_norm", "learning_rate", "eval_loss", "train_loss"), 1.5),
        **dict.fromkeys(("epoch", "total_flos", "train_runtime", "eval_samples_per_second"), 2.5),
    }
    assert set(dict(loggers._numbers(logs)).values()) == {1.5}


def test_a_library_that_the_job_imports_later_is_read_and_keeps_its_own_loader(recorded, library):
    with recorded.reading():
        module = importlib.import_module(library)
        assert type(module.__loader__).__module__ == "_frozen_importlib_external"
        assert module.__spec__.loader is module.__loader__
        assert module.Handler().on_log(loss=1) == 1
    assert module.Handler().on_log(loss=2) == 1
    assert not hasattr(module.Handler.on_log, "__wrapped__")
    with recorded.reading():  # the next job of a session
        module.Handler().on_log(loss=3)
    assert recorded.points == [(3, "loss", 1), (3, "loss", 3)]


def test_a_version_of_a_library_without_the_method_gives_no_points_and_no_error(recorded, library):
    module: Any = types.ModuleType(library)
    sys.modules[library] = module
    with recorded.reading():
        pass
    module.Handler = type("Handler", (), {})
    with recorded.reading():
        pass
    assert recorded.points == []


def test_a_library_that_calls_its_method_in_another_way_is_read_no_more_and_goes_on(
    recorded, library, capsys, monkeypatch
):
    def read(_handler):
        raise AssertionError

    monkeypatch.setitem(loggers._METHODS, library, ("Handler", "on_log", read))
    with recorded.reading():
        handler = importlib.import_module(library).Handler()
        assert [handler.on_log(loss=number) for number in range(3)] == [1, 1, 1]
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("nblaunch: no points are taken from library_of_the_test any more: ")


def test_a_method_that_somebody_else_has_wrapped_since_is_read_once_in_each_job(recorded, library):
    with recorded.reading():
        handler = importlib.import_module(library).Handler
        ours = handler.on_log
        handler.on_log = functools.partialmethod(ours)
    handler().on_log(loss=0)  # between two jobs
    with recorded.reading():
        handler().on_log(loss=1)
    assert recorded.points == [(3, "loss", 1)]
    loggers._wrapped.clear()


def test_what_raises_in_a_library_is_raised_and_its_points_are_there(recorded, library):
    with recorded.reading():
        handler = importlib.import_module(library).Handler
        with pytest.raises(TypeError, match="takes 1 positional argument but 2"):
            handler().on_log(1)
    assert recorded.points == []


def test_the_switch_in_the_environment_leaves_the_libraries_alone(recorded, bar, monkeypatch):
    monkeypatch.setenv("NBLAUNCH_LOGGERS", "0")
    with recorded.reading():
        bar(lambda number: {"loss": number})
    assert recorded.points == []


def test_a_child_of_the_rank_logs_nothing(recorded, bar):
    with recorded.reading():
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            bar(lambda number: {"loss": number})
            os.write(write, str(len(recorded.points)).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 9) == b"0"
    os.close(read)
    os.close(write)
