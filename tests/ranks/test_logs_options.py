"""Logs as torchrun's options have them: which output is shown, where all of it is kept, which lines twice."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
from older_torch import needs_line_filters, without_gloos_own

import nblaunch
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.messages import Stream

SPEAK = """
    import os, sys
    print("out", rank)
    print("err", rank, file=sys.stderr)
    rank * 10
"""


def speak():
    rank = int(os.environ["RANK"])
    print("out", rank)
    print("err", rank, file=sys.stderr)
    return rank


def lines(text):
    return [line for line in text.splitlines() if "] out" in line or "] err" in line]


# --- what is shown ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ("", ["[rank 0] out 0", "[rank 0] err 0", "[rank 1] out 1", "[rank 1] err 1"]),
        ("-r 1", ["[rank 0] err 0", "[rank 1] err 1"]),
        ("--redirects 2", ["[rank 0] out 0", "[rank 1] out 1"]),
        ("--redirects=3", []),
        ("-r 0:3,1:1", ["[rank 1] err 1"]),
        ("-r 3 -t 1:2", ["[rank 1] err 1"]),
        ("-r 3 --tee 3", ["[rank 0] out 0", "[rank 0] err 0", "[rank 1] out 1", "[rank 1] err 1"]),
        ("--local-ranks-filter 1", ["[rank 1] out 1", "[rank 1] err 1"]),
        ("--local_ranks_filter 1 -r 3 -t 2", ["[rank 1] err 1"]),
        ("--tee 3", ["[rank 0] out 0", "[rank 0] err 0", "[rank 1] out 1", "[rank 1] err 1"]),
    ],
)
def test_a_cell_shows_what_the_options_say_and_the_result_has_all(kernel, options, shown):
    ran = kernel.ok(f"%%distributed -n 2 --out res {options}{SPEAK.replace(chr(10) + '    ', chr(10))}")
    assert lines(ran.text) == shown
    assert kernel.value("res.values") == [0, 10]
    assert kernel.value("[each.stdout for each in res.ranks]") == ["out 0\n", "out 1\n"]
    assert kernel.value("[each.stderr for each in res.ranks]") == ["err 0\n", "err 1\n"]


@pytest.mark.slow_at("html")
@pytest.mark.parametrize("display", ["html", "widget"])
def test_the_panel_shows_no_more_than_the_text_does(start_kernel, display):
    kernel = start_kernel(NBLAUNCH_DISPLAY=display)
    ran = kernel.ok(
        "%%distributed -n 2 -r 2\nimport sys\nprint('shown on', rank)\nprint('kept', file=sys.stderr)"
    )
    everything = json.dumps(ran.displays) + ran.stdout
    assert "shown on" in everything
    assert "kept" not in everything


def test_the_functions_keywords_say_the_same(script):
    ran = script(
        """
        import sys, nblaunch
        def speak():
            print("to stdout")
            print("to stderr", file=sys.stderr)
        result = nblaunch.run(speak, nproc=2, redirects="3", tee="0:1", local_ranks_filter=[0], display=True)
        print("kept:", [each.stdout + each.stderr for each in result.ranks])
        """
    )
    assert ran.returncode == 0, ran.stderr
    assert [line for line in ran.stdout.splitlines() if " to std" in line] == ["[rank 0] to stdout"]
    assert "kept: ['to stdout\\nto stderr\\n', 'to stdout\\nto stderr\\n']" in ran.stdout


def test_a_failure_shows_the_last_lines_of_output_that_is_not_shown(kernel):
    error = kernel.fails(
        "%%distributed -n 2 -r 3\nimport os, sys\nprint('first')\nprint('the reason', file=sys.stderr)\n"
        "if rank == 1: os._exit(5)\nimport time; time.sleep(60)"
    )
    assert "rank 1 of 2 failed: ended with exit code 5" in error.evalue
    assert "last output of rank 1:\nfirst\nthe reason" in without_gloos_own(error.evalue)


def test_cells_of_a_session_show_what_it_was_started_with_unless_they_say_otherwise(kernel):
    kernel.ok("%distributed start -n 2 -r 2")
    body = "\nimport sys\nprint('out', rank)\nprint('err', rank, file=sys.stderr)"
    assert lines(kernel.ok(f"%%distributed{body}").text) == ["[rank 0] out 0", "[rank 1] out 1"]
    assert lines(kernel.ok(f"%%distributed -r 1{body}").text) == ["[rank 0] err 0", "[rank 1] err 1"]
    shown = kernel.ok(f"%%distributed --local-ranks-filter 1{body}").text
    assert lines(shown) == ["[rank 1] out 1"]
    kernel.ok("import os\nos.environ['PET_REDIRECTS'] = '1'")
    assert lines(kernel.ok(f"%%distributed{body}").text) == ["[rank 0] out 0", "[rank 1] out 1"]
    kernel.ok("del os.environ['PET_REDIRECTS']")
    kernel.ok("%distributed stop")


def test_what_is_shown_is_decided_by_the_agents_local_ranks(kernel):
    """With virtual local ranks every rank believes to be local rank 0."""
    ran = kernel.ok("%%distributed -n 2 --virtual-local-rank --local-ranks-filter 1\nprint('out', rank)")
    assert lines(ran.text) == ["[rank 1] out 1"]


@pytest.mark.quick
def test_a_stream_is_shown_unless_it_is_redirected_and_not_teed():
    """As with torchrun, where a stream comes to the console by tee, or by not being redirected."""
    for redirects in range(4):
        for tee in range(4):
            shown = LaunchOptions(redirects=str(redirects), tee=str(tee))
            for bit, stream in ((1, Stream.STDOUT), (2, Stream.STDERR)):
                assert shown.shows(0, stream) == (not redirects & bit or bool(tee & bit))


# --- where all of it is kept -----------------------------------------------------------------------


def test_a_log_directory_is_below_the_callers_own_and_made_as_it_makes_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o027)
    try:
        result = nblaunch.run(speak, nproc=1, log_dir="some/logs")
    finally:
        os.umask(before)
    assert result.log_dir.is_relative_to(tmp_path / "some" / "logs")
    assert (tmp_path / "some" / "logs").stat().st_mode & 0o777 == 0o750


def test_the_log_directory_is_laid_out_as_torchruns(tmp_path):
    """Both with one rank that fails in the first attempt, and a second attempt."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os\nfrom torch.distributed.elastic.multiprocessing.errors import record\n\n"
        "@record\ndef main():\n    print('out')\n"
        "    if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise ValueError('boom')\n\nmain()\n"
    )
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1",
         "--max-restarts", "1", "--redirects", "3", "--log-dir", str(tmp_path / "theirs"), str(program)],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip

    def main():
        print("out")
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("boom")

    result = nblaunch.run(main, nproc=1, max_restarts=1, log_dir=str(tmp_path / "ours"))
    (theirs,) = (tmp_path / "theirs").iterdir()
    ours = result.log_dir
    assert ours is not None
    assert ours.parent == tmp_path / "ours"
    layout = [sorted(str(path.relative_to(top)) for path in top.rglob("*")) for top in (ours, theirs)]
    assert layout[0] == layout[1]
    assert layout[0] == [
        "attempt_0", "attempt_0/0", "attempt_0/0/error.json", "attempt_0/0/stderr.log",
        "attempt_0/0/stdout.log",
        "attempt_1", "attempt_1/0", "attempt_1/0/stderr.log", "attempt_1/0/stdout.log",
    ]  # fmt: skip
    for top in (ours, theirs):
        assert without_gloos_own((top / "attempt_1/0/stdout.log").read_text()) == "out\n"
        error = json.loads((top / "attempt_0/0/error.json").read_text())
        assert error["message"]["message"] == "ValueError: boom"


def test_output_that_is_not_shown_is_in_the_files_too(tmp_path):
    result = nblaunch.run(speak, nproc=2, redirects="1", local_ranks_filter=[1], log_dir=str(tmp_path))
    assert result.log_dir is not None
    written = {
        str(path.relative_to(result.log_dir)): path.read_text() for path in result.log_dir.rglob("*.log")
    }
    assert {name: text.splitlines()[-1] for name, text in written.items()} == {
        "attempt_0/0/stdout.log": "out 0", "attempt_0/0/stderr.log": "err 0",
        "attempt_0/1/stdout.log": "out 1", "attempt_0/1/stderr.log": "err 1",
    }  # fmt: skip


# --- certain lines once more -----------------------------------------------------------------------


def filtered(result, stream):
    """Return what a file of filtered lines has by now: torch fills it while the ranks leave."""
    return sorted((result.log_dir / "attempt_0" / f"filtered_{stream}.log").read_text().splitlines())


@pytest.mark.quick
@needs_line_filters
def test_lines_with_certain_words_of_all_ranks_are_in_a_file_of_their_own(eventually):
    def job():
        rank = os.environ["RANK"]
        print(f"loss 0.1 on {rank}\nnothing\nstep 7 on {rank}")
        print(f"warning: {rank}\nloss of data on {rank}", file=sys.stderr)

    result = nblaunch.run(
        job, nproc=2, role="trainer",
        duplicate_stdout_filters=["loss", "step"], duplicate_stderr_filters=["warning"],
    )  # fmt: skip
    out, err = [
        "[trainer0]:loss 0.1 on 0", "[trainer0]:step 7 on 0",
        "[trainer1]:loss 0.1 on 1", "[trainer1]:step 7 on 1",
    ], ["[trainer0]:warning: 0", "[trainer1]:warning: 1"]  # fmt: skip
    eventually(
        lambda: [filtered(result, each) for each in ("stdout", "stderr")] == [out, err], "all is there"
    )


@needs_line_filters
def test_filtered_lines_begin_as_the_template_says(eventually):
    result = nblaunch.run(
        lambda: print("step"), nproc=2, role="trainer", duplicate_stdout_filters=["step"],
        log_line_prefix_template="${hostname}:${role_name}${local_rank}/${rank} $else ",
    )  # fmt: skip
    host = socket.gethostname()
    wanted = [f"{host}:trainer{rank}/{rank} $else step" for rank in (0, 1)]
    eventually(lambda: filtered(result, "stdout") == wanted, "all is there")


@needs_line_filters
def test_each_attempt_has_its_own_filtered_lines_and_the_files_grow_while_the_run_lasts(
    kernel, tmp_path, eventually
):
    running = kernel.submit(
        f"""
        %%distributed -n 2 --log-dir {tmp_path} --max-restarts 1 --duplicate-stdout-filters step --out res
        import os, pathlib, time
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("step of", attempt)
        if attempt == "0":
            assert rank != 0
            time.sleep(60)
        while not pathlib.Path({str(tmp_path)!r}, "go on").exists():
            time.sleep(0.01)
        """
    )

    def filtered(attempt):
        return [
            path.read_text().splitlines()
            for path in tmp_path.glob(f"*/attempt_{attempt}/filtered_stdout.log")
        ]

    wanted = [["[rank0]:step of 1", "[rank1]:step of 1"]]
    eventually(lambda: [sorted(each) for each in filtered(1)] == wanted, "the second attempt's lines", 30)
    (tmp_path / "go on").touch()
    ran = running.finish()
    assert ran.error is None, ran
    assert "[rank0]:step of 0" in filtered(0)[0]
    assert not list(tmp_path.glob("*/attempt_*/filtered_stderr.log"))


@pytest.mark.slow
@needs_line_filters
def test_a_program_with_filters_ends_by_itself(script):
    """torch's own tail of a log keeps Python from ending while its ranks are there."""
    ran = script(
        """
        import nblaunch
        session = nblaunch.Session(nproc=1, duplicate_stdout_filters=["x"])
        print(session.run(lambda: 7).values)
        """
    )
    assert (ran.returncode, ran.stdout) == (0, "[7]\n"), ran.stderr


# --- a class of the user's own ---------------------------------------------------------------------

SPECS = """
import os
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs

class Flat(LogsSpecs):
    def reify(self, envs):
        name = lambda rank, kind: os.path.join(self._root_log_dir, f"{envs[rank]['RANK']}.{kind}")
        for rank in envs:
            envs[rank]["TORCHELASTIC_ERROR_FILE"] = name(rank, "error")
        return LogsDest(
            {rank: name(rank, "out") for rank in envs}, {rank: name(rank, "err") for rank in envs}, {}, {},
            {rank: name(rank, "error") for rank in envs},
            name(0, "filtered"), name(0, "filtered_err"),
        )

    @property
    def root_log_dir(self):
        return self._root_log_dir

class Nowhere(DefaultLogsSpecs):
    def reify(self, envs):
        files = super().reify(envs)
        files.stdouts[1] = ""
        return files

class Broken(LogsSpecs):
    pass
"""


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """Install a package with entry points of the group, as pip would."""
    (tmp_path / "our_logs.py").write_text(SPECS)
    info = tmp_path / "our_logs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: our-logs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[torchrun.logs_specs]\nflat = our_logs:Flat\nnowhere = our_logs:Nowhere\n"
        "broken = our_logs:Broken\nmissing = our_logs:Missing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@needs_line_filters
@pytest.mark.usefixtures("plugins")
def test_a_class_of_the_users_own_says_where_logs_are(tmp_path):
    logs = tmp_path / "logs"
    result = nblaunch.run(
        speak, nproc=2, logs_specs="flat", log_dir=str(logs), duplicate_stdout_filters=["1"]
    )
    assert [(each.stdout, each.stderr) for each in result.ranks] == [
        ("out 0\n", "err 0\n"),
        ("out 1\n", "err 1\n"),
    ]
    assert result.events
    assert result.log_dir == logs
    assert sorted(path.name for path in logs.iterdir()) == ["0.err", "0.filtered", "0.out", "1.err", "1.out"]
    assert (logs / "0.filtered").read_text() == "[rank1]:out 1\n"


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flatt", "no installed package has .*there are: broken, default, flat, missing, nowhere"),
        ("missing", "cannot be loaded: AttributeError"),
        ("broken", "cannot be made: TypeError"),
    ],
)
def test_a_class_that_cannot_be_had_is_refused_before_anything_starts(name, message):
    with pytest.raises(nblaunch.OptionError, match=f"logs_specs='{name}' was asked for, but .*{message}"):
        nblaunch.run(speak, nproc=2, logs_specs=name)


def test_torchs_own_entry_point_is_what_there_is_without_one(tmp_path):
    result = nblaunch.run(speak, nproc=1, logs_specs="default", log_dir=str(tmp_path))
    assert result.ranks[0].stdout == "out 0\n"
    (written,) = tmp_path.glob("*/attempt_0/0/stdout.log")
    assert without_gloos_own(written.read_text()) == "out 0\n"


@pytest.mark.usefixtures("plugins")
def test_a_class_that_gives_a_stream_no_file_is_refused():
    with pytest.raises(nblaunch.LaunchError, match="names no file for stdout of local rank 1"):
        nblaunch.run(speak, nproc=2, logs_specs="nowhere")
