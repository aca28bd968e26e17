"""What ranks print is in the result: all of it, in order, each rank's own."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading

import pytest

import nblaunch


def printed(job, *, nproc=1, **options):
    """Run `job` and return (stdout, stderr) of every rank."""
    result = nblaunch.run(job, nproc=nproc, check=False, **options)
    return [(each.stdout, each.stderr) for each in result.ranks]


@pytest.mark.quick
def test_each_rank_has_its_own_output_by_stream():
    def job():
        rank = os.environ["RANK"]
        print("out", rank)
        print("err", rank, file=sys.stderr)
        logging.getLogger().error("logged %s", rank)

    assert printed(job, nproc=3) == [(f"out {rank}\n", f"err {rank}\nlogged {rank}\n") for rank in range(3)]


def test_a_run_prints_nothing_itself_unless_asked(capfd):
    nblaunch.run(lambda: print("hidden"), nproc=2)
    assert capfd.readouterr() == ("", "")
    nblaunch.run(lambda: print("shown"), nproc=2, display=True)
    assert "shown" in capfd.readouterr().out


@pytest.mark.quick
def test_python_native_code_and_child_processes_keep_their_order():
    def job():
        libc = ctypes.CDLL(None)
        print("1 print")
        os.write(1, b"2 os.write\n")
        sys.stdout.write("3 sys.stdout\n")
        libc.printf(b"4 printf\n")
        libc.fflush(None)
        subprocess.run(["echo", "5 echo"], check=True)
        os.system("echo 6 system")
        sys.stdout.buffer.write(b"7 buffer\n")
        print("8 ", end="")
        print("print", flush=True)
        sys.__stdout__.write("9 __stdout__\n")
        with open(1, "w", closefd=False) as file:
            file.write("10 open(1)\n")

    ((out, err),) = printed(job)
    assert out.splitlines() == [
        *("1 print", "2 os.write", "3 sys.stdout", "4 printf", "5 echo"),
        *("6 system", "7 buffer", "8 print", "9 __stdout__", "10 open(1)"),
    ]
    assert err == ""


@pytest.mark.quick
def test_text_arrives_as_it_was_printed():
    text = "\n\na\rb\r\nc, tab\t\0\x1b[31mred\x1b[0m, na\xefve \N{SNOWMAN}" + "\N{ROCKET}" * 200_000

    def job():
        sys.stdout.write(text)
        sys.stderr.write(text)

    assert printed(job, nproc=2) == [(text, text)] * 2


def test_characters_that_no_file_can_hold_are_written_as_their_codes():
    assert printed(lambda: print("a\ud800b")) == [("a\\ud800b\n", "")]


def test_bytes_that_are_no_text_become_replacement_characters():
    assert printed(lambda: os.write(1, b"before \xff\xfe after\n") and None) == [
        ("before \ufffd\ufffd after\n", "")
    ]


def test_a_character_cut_by_two_writes_is_whole():
    def job():
        first, second = b"\xe2\x98", b"\x83\n"
        os.write(1, first)
        print(end="", file=sys.stderr)
        os.write(2, b"between\n")
        os.write(1, second)

    assert printed(job) == [("\N{SNOWMAN}\n", "between\n")]


@pytest.mark.parametrize("end", [lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: os._exit(0), os.abort])
def test_what_was_printed_before_a_sudden_death_is_there(end):
    def job():
        for number in range(5000):
            print(number)
        os.write(1, b"last word")
        end()

    ((out, _),) = printed(job)
    assert out == "".join(f"{number}\n" for number in range(5000)) + "last word"


def test_what_was_printed_before_an_exception_or_a_timeout_is_there():
    def job(fail):
        print("before")
        if fail:
            raise ValueError
        threading.Event().wait()

    assert printed(job, args=(True,)) == [("before\n", "")]
    with pytest.raises(nblaunch.RunTimeoutError) as caught:
        nblaunch.run(job, args=(False,), nproc=1, timeout=0.5, grace=0.2)
    assert caught.value.result is not None
    assert caught.value.result.ranks[0].stdout == "before\n"


def test_redirecting_a_stream_inside_the_job_works():
    def job():
        import contextlib
        import io

        with contextlib.redirect_stdout(io.StringIO()) as caught:
            print("inside")
        print("outside")
        return caught.getvalue()

    result = nblaunch.run(job, nproc=1)
    assert result.values == ["inside\n"]
    assert result.ranks[0].stdout == "outside\n"


def test_streams_look_like_streams_to_programs():
    def job():
        streams = (sys.stdout, sys.stderr)
        return [
            (each.isatty(), each.fileno(), each.encoding, each.writable()) for each in streams
        ], sys.stdin.read()

    assert (
        nblaunch.run(job, nproc=2).values
        == [([(False, 1, "utf-8", True), (False, 2, "utf-8", True)], "")] * 2
    )


def test_displays_of_a_function_are_in_the_result():
    def job():
        from IPython.display import HTML, Image, clear_output, display

        display(HTML(f"<b>{os.environ['RANK']}</b>"))
        display({"text/plain": "kept"}, raw=True, metadata={"text/plain": {"more": 1}})
        display(Image(data=b"\x89PNG\r\n\x1a\n", format="png"))
        if os.environ["RANK"] == "1":
            clear_output()

    result = nblaunch.run(job, nproc=2)
    first, second, third = result.ranks[0].displays
    assert first.data["text/html"] == "<b>0</b>"
    assert (second.data, second.metadata) == ({"text/plain": "kept"}, {"text/plain": {"more": 1}})
    assert third.data["image/png"].strip() == "iVBORw0KGgo="
    assert result.ranks[1].displays == ()
