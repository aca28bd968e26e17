"""However a rank ends, the run ends: with the right cause, and with what the other ranks returned."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
import threading
import time

import pytest
from chaos import reported
from lanes import sampled

import nblaunch

pytestmark = pytest.mark.quick


class TwoArgumentsError(Exception):
    """Pickles, and cannot be unpickled."""

    def __init__(self, what, why):
        super().__init__(f"{what} because {why}")


class HoldsLockError(Exception):
    """Cannot be pickled."""

    def __init__(self):
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class RefusesError(Exception):
    """Raises when it is pickled."""

    def __reduce__(self):
        raise TypeError("never")


class SilentError(Exception):
    """Cannot even be printed."""

    def __str__(self):
        raise ZeroDivisionError


class Unreadable:
    """Arrives, and then cannot be made again."""

    def __reduce__(self):
        return int, ("not a number",)


def on_rank_1(action):
    """Return a function that does `action` on rank 1, and returns "kept" on every other."""

    def job():
        if os.environ["RANK"] == "1":
            return action()
        return "kept"

    return job


def failed(action, **options):
    """Run `action` on rank 1 of 2; return the error, the result and rank 1's part of it."""
    with pytest.raises(nblaunch.RunFailedError) as caught:
        nblaunch.run(on_rank_1(action), nproc=2, **options)
    error = caught.value
    assert error.result is not None
    assert error.root_cause is not None
    reported(error.root_cause, error.result)
    return error, error.result, error.result.ranks[1]


# --- a rank that raises ----------------------------------------------------------------------------


def test_the_error_names_the_rank_the_exception_and_the_users_own_line():
    def action():
        numbers = {"present": 1}
        return numbers["absent"]  # this line

    error, result, _ = failed(action)
    source = pathlib.Path(__file__).read_text().splitlines()
    line = 1 + next(number for number, text in enumerate(source) if text.endswith("# this line"))
    assert str(error).startswith("rank 1 of 2 failed: KeyError: 'absent'")
    assert f"{__file__}, line {line}" in str(error)
    assert 'return numbers["absent"]' in str(error)
    assert type(error.__cause__) is KeyError
    assert error.root_cause is result.root_cause
    (failure,) = result.failures
    assert (failure.rank, failure.type, failure.exitcode, failure.signal) == (1, "builtins.KeyError", 1, None)
    assert failure.exception is error.__cause__
    assert failure.consequence_of is None
    assert failure.phase == "job"
    assert "\n" not in failure.reason
    assert failure.traceback.rstrip().endswith("KeyError: 'absent'")
    assert "nblaunch/rank" not in failure.traceback
    assert failure.frame is not None
    assert (failure.frame.function, failure.frame.line) == ("action", line)


def test_the_values_of_the_other_ranks_are_kept():
    def action():
        raise ValueError("why")

    _, result, _ = failed(action)
    assert not result.ok
    assert result.values == ["kept", None]
    assert (result[0], result.ranks[0].state, result.ranks[0].failure) == ("kept", "SUCCEEDED", None)
    assert (result.ranks[1].state, result.ranks[1].exitcode, result.ranks[1].value) == ("FAILED", 1, None)
    with pytest.raises(ValueError, match=r"^why$"):
        result[1]
    assert "failed, root cause: rank 1: ValueError" in repr(result)


@pytest.mark.full
def test_notes_attributes_and_causes_of_an_exception_survive():
    def action():
        error = OSError(2, "gone", "/some/file")
        error.add_note("a note for the reader")
        error.__dict__["extra"] = {"more": 1}
        raise error from ZeroDivisionError("underneath")

    error, _, part = failed(action)
    cause = error.__cause__
    assert isinstance(cause, FileNotFoundError)
    assert (cause.errno, cause.filename, cause.__notes__, vars(cause)["extra"]) == (
        2,
        "/some/file",
        ["a note for the reader"],
        {"more": 1},
    )
    assert "a note for the reader" in part.failure.traceback
    assert "ZeroDivisionError: underneath" in part.failure.traceback
    assert "direct cause" in part.failure.traceback


@pytest.mark.full
@pytest.mark.parametrize(
    ("exception", "arguments", "message"),
    [
        (HoldsLockError, (), "holds a lock"),
        (TwoArgumentsError, ("this", "that"), "this because that"),
        (RefusesError, ("odd",), "odd"),
        (SilentError, (), "<its text raised ZeroDivisionError>"),
    ],
)
def test_an_exception_that_cannot_be_sent_is_told_in_words(exception, arguments, message):
    def action():
        raise exception(*arguments)

    error, _, part = failed(action)
    assert part.failure.type.endswith(exception.__name__)
    assert part.failure.message == message
    assert message in str(error)
    assert exception.__name__ in part.failure.traceback
    assert error.__cause__ is part.failure.exception
    if exception is not SilentError:
        assert error.__cause__ is None
        with pytest.raises(nblaunch.RunFailedError, match=message):
            error.result[1]


@pytest.mark.full
def test_a_megabyte_of_exception_text_is_cut_in_the_middle():
    def action():
        raise ValueError("begin " + "x" * 1_000_000 + " end")

    error, result, part = failed(action)
    for text in (part.failure.message, part.failure.traceback):
        assert len(text) < 200_000
        assert "begin x" in text
        assert "x end" in text
        assert "characters left out" in text
    for line in (part.failure.reason, repr(result), str(error)):
        assert len(line) < 10_000
        assert "begin x" in line
    assert len(str(error.__cause__)) > 1_000_000


@pytest.mark.full
def test_a_keyboard_interrupt_of_the_jobs_own_is_a_failure_of_its_rank():
    def action():
        raise KeyboardInterrupt

    error, _, part = failed(action)
    assert isinstance(error.__cause__, KeyboardInterrupt)
    assert (part.state, part.exitcode, part.failure.rank) == ("FAILED", 1, 1)


def test_ranks_that_wait_for_the_failed_one_are_consequences_or_stopped():
    def job():
        from torch import distributed

        if os.environ["RANK"] == "2":
            raise LookupError("the cause")
        distributed.barrier()

    with pytest.raises(nblaunch.RunFailedError) as caught:
        nblaunch.run(job, nproc=4)
    result = caught.value.result
    assert result is not None
    assert isinstance(caught.value.__cause__, LookupError)
    assert result.root_cause.rank == 2
    assert all(failure.consequence_of == 2 for failure in result.failures[1:])
    assert {each.state for each in result.ranks} <= {"FAILED", "STOPPED"}
    assert "rank 2 of 4 failed: LookupError: the cause" in str(caught.value)


# --- a rank that ends without raising --------------------------------------------------------------


def exit_as(code):
    return lambda: sys.exit(code)


@pytest.mark.parametrize(
    ("code", "exitcode"),
    sampled([(3, 3), ("in words", 1), (-1, 255), (1 << 80, 1)], 2),
    ids=str,
)
def test_sys_exit_with_a_code_is_a_failure_of_that_code(code, exitcode):
    error, result, part = failed(exit_as(code))
    assert isinstance(error.__cause__, SystemExit)
    assert error.__cause__.code == code
    assert (part.state, part.exitcode) == ("FAILED", exitcode)
    assert (part.failure.exitcode, part.failure.signal, part.failure.type) == (
        exitcode,
        None,
        "builtins.SystemExit",
    )
    assert part.stderr == ("" if isinstance(code, int) else f"{code}\n")
    assert result[0] == "kept"


@pytest.mark.parametrize("code", [None, 0])
def test_sys_exit_without_a_code_ends_a_job_well(code):
    result = nblaunch.run(on_rank_1(exit_as(code)), nproc=2)
    assert result.values == ["kept", None]
    assert (result.ranks[1].state, result.ranks[1].exitcode) == ("SUCCEEDED", 0)


@pytest.mark.full
def test_a_job_that_closes_every_descriptor_still_ends():
    """A rank that cannot speak any more; its ZMQ may find that out before it leaves."""

    def action():
        os.closerange(3, 1000)
        os._exit(5)

    _, _, part = failed(action)
    assert part.state == "FAILED"
    assert part.exitcode in (5, -signal.SIGABRT)


# --- a value that cannot be sent -------------------------------------------------------------------


def test_a_value_that_cannot_be_pickled_is_a_failure_of_its_rank_that_says_so():
    error, result, part = failed(lambda: [sys._getframe()])
    assert result[0] == "kept"
    assert part.state == "FAILED"
    assert part.failure.phase == "value transfer"
    assert "cannot be sent to the notebook" in part.failure.message
    assert "frame" in part.failure.message
    assert "Return plain data" in str(error)


def test_a_value_that_cannot_be_unpickled_is_a_failure_of_its_rank_that_says_so():
    error, result, part = failed(Unreadable)
    assert result.values == ["kept", None]
    assert part.state == "FAILED"
    assert part.failure.phase == "value transfer"
    assert "rank 1 returned a value that the notebook cannot unpickle" in str(error)
    assert "invalid literal" in str(error)


# --- time ------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_run_that_takes_longer_than_its_timeout_is_ended():
    def job():
        if os.environ["RANK"] == "0":
            return "in time"
        time.sleep(100)
        return None

    with pytest.raises(nblaunch.RunTimeoutError, match=r"given 3 s and did not end") as caught:
        nblaunch.run(job, nproc=2, timeout=3)
    error = caught.value
    assert isinstance(error, TimeoutError)
    assert isinstance(error, nblaunch.RunFailedError)
    assert error.result is not None
    assert error.result.values == ["in time", None]
    assert [each.state for each in error.result.ranks] == ["SUCCEEDED", "STOPPED"]
    assert "[rank 0] had finished" in str(error)
    assert "[rank 1] at" in str(error)
    assert "time.sleep(100)" in str(error)
    with pytest.raises(nblaunch.RunFailedError, match="rank 1 has no value: its state is STOPPED"):
        error.result[1]


# --- refused before anything starts ----------------------------------------------------------------

REFUSED = """
    import json, os, sys, tempfile, threading
    import psutil
    import nblaunch

    class Trainer:
        def __init__(self):
            self.model = {"weights": [1, 2], "lock": threading.Lock()}

    trainer = Trainer()

    def uses_trainer():
        return trainer

    def attempt(function, **options):
        try:
            nblaunch.run(function, **options)
        except nblaunch.NblaunchError as error:
            fields = [getattr(error, name, None) for name in ("name", "path", "size")]
            return [type(error).__name__, str(error), *fields]

    def nothing():
        pass

    print(json.dumps({
        "errors": [
            attempt(nothing, nproc=0),
            attempt(nothing, nproc="many"),
            attempt(nothing, nproc=2, backend="nccl"),
            attempt(nothing, nproc="gpu"),
            attempt(nothing, time_out=3),
            attempt(nothing, timeout=-1),
            attempt(nothing, max_restarts=-1),
            attempt(nothing, nproc=2, log_dir=__file__),
            attempt(nothing, env=["A=1"]),
            attempt("nothing", nproc=2),
            attempt(nothing, nproc=2, args=(trainer,)),
            attempt(nothing, nproc=2, kwargs={"with_": trainer}),
            attempt(uses_trainer, nproc=2),
        ],
        "children": len(psutil.Process().children(recursive=True)),
        "threads": threading.active_count(),
        # The private directory lies here where the path is short enough for a socket.
        "files": [name for name in os.listdir(tempfile.gettempdir()) if not name.startswith("nblaunch-")],
    }))
"""


@pytest.mark.full
def test_wrong_options_and_values_that_cannot_be_sent_are_refused_before_any_process_starts(script, tmp_path):
    (tmp_path / "tmp").mkdir()
    done = script(REFUSED, env={"TMPDIR": str(tmp_path / "tmp")})
    assert done.returncode == 0, done.stderr
    refused = json.loads(done.stdout)
    assert [error[0] for error in refused["errors"]] == ["OptionError"] * 10 + ["CaptureError"] * 3
    said = [error[1] for error in refused["errors"]]
    for text, expected in zip(
        said,
        [
            *("nproc", "nproc", "backend='gloo'", "no GPU is visible", "timeout", "timeout", "max_restarts"),
            *("log_dir", "env", "the script 'nothing' was asked for"),
            *("lock", "lock", "lock"),
        ],
        strict=True,
    ):
        assert expected in text
    # The runtime has refused some of it: it, the fork server and their keeper are there, and no rank.
    assert (refused["children"], refused["threads"], refused["files"]) == (3, 1, [])
    # What cannot be sent is named with its path and size.
    positional, by_name, from_globals = refused["errors"][-3:]
    assert positional[2:4] == ["args[0]", "args[0].model['lock']"]
    assert by_name[2:4] == ["kwargs['with_']", "kwargs['with_'].model['lock']"]
    assert from_globals[3] == "uses_trainer (global trainer).model['lock']"
    for _, message, _, path, size in (positional, by_name, from_globals):
        assert size > 0
        assert path in message
        assert f"{size} bytes" in message
        assert "_thread.lock" in message


@pytest.mark.full
def test_errors_can_be_pickled_with_all_that_they_know():
    import pickle

    def action():
        raise ValueError("why")

    error, _, _ = failed(action)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert copy.root_cause.message == "why"
    assert copy.result.values == ["kept", None]


@pytest.mark.slow
def test_an_uncaught_failure_of_a_script_shows_the_ranks_traceback(script):
    done = script(
        """
        import os
        import nblaunch

        def job():
            if os.environ["RANK"] == "1":
                raise ValueError("in a script")

        nblaunch.run(job, nproc=2)
        """
    )
    assert done.returncode == 1
    assert "rank 1 of 2 failed: ValueError: in a script" in done.stderr
    assert 'raise ValueError("in a script")' in done.stderr


@pytest.mark.full
def test_a_killed_rank_leaves_no_directory_of_torchs():
    """torch 2.8 makes one for templates with the first DDP; a later torch makes none."""

    def die():
        from torch.distributed.nn.jit import instantiator

        sys.stdout.write(getattr(instantiator, "INSTANTIATED_TEMPLATE_DIR_PATH", ""))
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    result = nblaunch.run(die, nproc=1, check=False)
    assert result.root_cause.signal == "SIGKILL"
    made = result.ranks[0].stdout
    assert not made or not pathlib.Path(made).exists()


@pytest.mark.slow
def test_a_rank_that_cannot_connect_says_why(poke):
    poke("type(local.hub).address = property(lambda _: 'nowhere://at.all')")
    with pytest.raises(nblaunch.LaunchError, match="could not be started") as caught:
        nblaunch.run(lambda: 1, nproc=2)
    assert "zmq.error.ZMQError: Protocol not supported" in str(caught.value)
