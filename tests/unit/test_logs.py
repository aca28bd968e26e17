"""The tail of a rank's two log files: complete, in order, whatever the bytes."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch._results import LogText, read_text
from nblaunch.group.job import RankLogs
from nblaunch.host import logs
from nblaunch.host.logs import LogTail
from nblaunch.host.settings import Worker
from nblaunch.protocol.messages import Offsets, Payload, Returned, Started, Stream

MIB = 1 << 20

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


# --- bounds ------------------------------------------------------------------------------------------

LINE = "x" * 1023 + "\n"


def _room(path: Path) -> int:
    return path.stat().st_blocks * 512


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(logs, "MOST_BYTES", 2 * MIB)


@pytest.mark.parametrize("bounded", [True, False])
def test_of_a_bounded_file_the_last_part_is_kept_once_all_was_read(tmp_path, small, bounded):  # noqa: ARG001
    tail = LogTail(0, str(tmp_path / "stdout"), str(tmp_path / "stderr"), bounded=bounded)
    seen = ""
    for _ in range(8):
        _append(tmp_path, Stream.STDOUT, LINE * 1024)
        seen += "".join(each.text for each in tail.poll())
    assert _room(tmp_path / "stdout") == (8 - 5 * bounded) * MIB, "the last poll has left one for the next"
    seen += "".join(each.text for each in tail.rest())
    assert _room(tmp_path / "stdout") == (8 - 6 * bounded) * MIB
    tail.close()
    assert seen == LINE * 8 * 1024


def test_what_is_read_later_says_how_much_is_gone(tmp_path, small):  # noqa: ARG001
    path = tmp_path / "stdout"
    tail = LogTail(0, str(path), str(tmp_path / "stderr"), bounded=True)
    _append(tmp_path, Stream.STDOUT, "first\n" + LINE * 4096)
    for _ in range(2):
        list(tail.poll())
    tail.close()
    # From where the hole ends, the rest of a line is left out.
    gone = 6 + 2048 * 1024
    kept = LINE * 2048
    for start in (0, 6, MIB):
        for text in (read_text(str(path), start), str(LogText(str(path), start, path.stat().st_size, None))):
            assert text == f"[{gone - start:,} bytes before this are no longer kept]\n{kept}"
    assert read_text(str(path), 0, MIB) == f"[{MIB:,} bytes before this are no longer kept]\n"
    assert read_text(str(path), gone, gone + 1024) == LINE
    assert read_text(str(path), 0, 0) == ""


class Logs:
    """The log files of two ranks, on which job after job writes."""

    def __init__(self, root: Path, private: Path | None) -> None:
        self.root, self.attempt = root, -1
        self.logs = RankLogs(private)

    def start_ranks(self) -> None:
        self.attempt += 1
        self.files = []
        for rank in range(2):
            directory = self.root / f"attempt_{self.attempt}" / str(rank)
            directory.mkdir(parents=True)
            for stream in Stream:
                (directory / stream).write_text("")
            self.files.append(directory)
        places = [(str(each / "stdout"), str(each / "stderr")) for each in self.files]
        workers = [Worker(rank, rank, 0, *place) for rank, place in enumerate(places)]
        self.logs.begin(self.attempt)
        self.logs.extend(tuple(workers))

    def job(self, mebibytes: int):
        files = self.logs.begin_job(self.attempt)
        for rank, directory in enumerate(self.files):
            list(self.logs.before(Started(rank=rank, time=0, offsets=_offsets(directory))))
            _append(directory, Stream.STDOUT, LINE * 1024 * mebibytes)
            value = Returned(rank=rank, value=Payload(sizes=()), time=0, offsets=_offsets(directory))
            list(self.logs.before(value))
        return files

    def room(self, attempt: int) -> list[int]:
        return [_room(path) // MIB for path in sorted(self.root.glob(f"attempt_{attempt}/*/stdout"))]


def test_what_is_older_than_a_job_goes_and_what_it_refers_to_stays(tmp_path):
    ranks = Logs(tmp_path, tmp_path)
    ranks.start_ranks()
    ranks.job(2)
    second, third = ranks.job(1), ranks.job(3)
    ranks.logs.free_before(second)
    assert ranks.room(0) == [4, 4]
    ranks.start_ranks()
    assert list(third) == [0, 1], "the ranks were replaced after it"
    fourth, fifth = ranks.job(1), ranks.job(1)
    ranks.logs.free_before(third)
    assert ranks.room(0) == [4, 4], "of ranks that are gone a file goes as a whole"
    ranks.logs.free_before(fourth)
    assert (ranks.room(0), ranks.room(1)) == ([], [2, 2])
    ranks.logs.free_before(fifth)
    assert ranks.room(1) == [1, 1]
    ranks.logs.free_before({})
    assert ranks.room(1) == [0, 0]
    ranks.logs.close()


def test_files_elsewhere_are_left_alone(tmp_path):
    ranks = Logs(tmp_path / "own", tmp_path / "private")
    ranks.start_ranks()
    ranks.job(2)
    ranks.start_ranks()
    ranks.job(2)
    ranks.logs.free_before({})
    assert (ranks.room(0), ranks.room(1)) == ([2, 2], [2, 2])
    ranks.logs.close()
