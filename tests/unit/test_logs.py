"""The tail of a rank's two log files: complete, in order, whatever the bytes."""

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from nblaunch.elastic.logs import LogTail, read_text
from nblaunch.protocol.messages import Offsets, Stream

# What a rank writes: (stream, text) in order; after each change of stream it announces its offsets.
_writes = st.lists(st.tuples(st.sampled_from(list(Stream)), st.text(max_size=20)), max_size=30)


def _tail(directory: Path) -> LogTail:
    for stream in Stream:
        (directory / stream).write_bytes(b"")
    return LogTail(3, str(directory / "stdout"), str(directory / "stderr"))


def _append(directory: Path, stream: Stream, text: str) -> None:
    with (directory / stream).open("ab") as file:
        file.write(text.encode("utf-8", "surrogatepass"))


def _offsets(directory: Path) -> Offsets:
    return Offsets(*((directory / stream).stat().st_size for stream in Stream))


@given(_writes, st.lists(st.booleans(), min_size=30, max_size=30))
def test_text_keeps_its_order_across_both_streams_whenever_it_is_polled(writes, polls):
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tail = _tail(directory)
        seen = []
        last = Stream.STDOUT
        for (stream, text), poll in zip(writes, polls, strict=False):
            if stream is not last:
                # As in a rank: the announcement is under way before the other stream is written.
                seen += tail.up_to(_offsets(directory))
                last = stream
            _append(directory, stream, text)
            if poll:
                seen += tail.poll()
        seen += tail.up_to(_offsets(directory))
        tail.close()
        assert _merged((each.stream, each.text) for each in seen) == _merged(writes)


def _merged(pieces):
    merged = []
    for stream, text in pieces:
        if not text:
            continue
        if merged and merged[-1][0] is stream:
            merged[-1] = (stream, merged[-1][1] + text)
        else:
            merged.append((stream, text))
    return merged


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=10))
def test_bytes_that_are_no_text_are_shown_and_lose_nothing_around_them(data, cuts):
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tail = _tail(directory)
        (directory / "stdout").write_bytes(data)
        text = "".join(
            each.text for cut in sorted(cuts) for each in tail.up_to(Offsets(stdout=min(cut, len(data))))
        )
        text += "".join(each.text for each in tail.rest())
        tail.close()
        whole = data.decode("utf-8", "replace")
        # An unfinished character at the very end waits for its rest.
        assert whole.startswith(text)
        assert len(whole) - len(text) <= 3


def test_a_poll_leaves_what_was_written_since_the_poll_before_it(tmp_path):
    tail = _tail(tmp_path)
    _append(tmp_path, Stream.STDOUT, "first\n")
    assert not list(tail.poll())
    _append(tmp_path, Stream.STDOUT, "second\n")
    assert [each.text for each in tail.poll()] == ["first\n"]
    assert [each.text for each in tail.rest()] == ["second\n"]
    tail.close()


def test_a_log_that_is_gone_is_empty_text(tmp_path):
    assert read_text(str(tmp_path / "none")) == ""
    assert not list(LogTail(0, str(tmp_path / "a"), str(tmp_path / "b")).rest())
