"""Frames are the same on the other side, however their bytes are cut; what announces too much is refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.protocol.framing import LIMIT, LIMIT_BEFORE_WELCOME, Frame, FrameKind, Frames, header
from nblaunch.protocol.messages import ProtocolError

HEADER_BYTES = 13
SAMPLE = [
    Frame(FrameKind.STRUCT, 0, b"introduce"),
    Frame(FrameKind.FOLDED, 2**64 - 1, b""),
    Frame(FrameKind.EVENT, 7, bytes(range(256))),
]


def written(frames):
    return b"".join(header(frame.kind, frame.number, len(frame.body)) + frame.body for frame in frames)


def read(parts, limit=LIMIT):
    frames, found = Frames(limit), []
    for part in parts:
        frames.feed(part)
        found += frames
    return found


def test_half_a_frame_is_none():
    data = written(SAMPLE[:1])
    assert [read([data[:at]]) for at in range(len(data))] == [[]] * len(data)


@pytest.mark.parametrize(("limit", "length"), [(LIMIT, 2**32 - 1), (LIMIT, LIMIT + 1), (4096, 4097)])
def test_a_body_over_the_limit_is_refused_by_its_header(limit, length):
    frames = Frames(limit)
    frames.feed(struct.pack("<IBQ", length, 0, 1) + b"the beginning")
    with pytest.raises(ProtocolError, match=f"{length} bytes, and {limit} are allowed"):
        list(frames)
    assert list(frames) == []


def test_what_came_before_a_refused_frame_is_yielded():
    frames = Frames(LIMIT)
    frames.feed(written(SAMPLE) + struct.pack("<IBQ", 2**32 - 1, 0, 1))
    iterator = iter(frames)
    assert [next(iterator) for _ in SAMPLE] == SAMPLE
    with pytest.raises(ProtocolError):
        next(iterator)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ProtocolError, match="kind 3"):
        read([struct.pack("<IBQ", 0, 3, 1)])


def test_no_header_announces_more_than_the_limit():
    assert len(header(FrameKind.STRUCT, 1, LIMIT)) == HEADER_BYTES
    with pytest.raises(ProtocolError, match=f"{LIMIT} bytes is the most"):
        header(FrameKind.STRUCT, 1, LIMIT + 1)


def test_the_limit_may_be_raised():
    frames = Frames(LIMIT_BEFORE_WELCOME)
    frames.limit = LIMIT
    long = Frame(FrameKind.STRUCT, 1, bytes(LIMIT_BEFORE_WELCOME + 1))
    frames.feed(written([long]))
    assert list(frames) == [long]


def test_no_more_than_one_frame_is_kept():
    """Each chunk is taken before the next: what remains is the beginning of one frame."""
    frames, frame = Frames(1000), written([Frame(FrameKind.FOLDED, 1, bytes(1000))])
    stream, kept = frame * 50, []
    for at in range(0, len(stream), 700):
        frames.feed(stream[at : at + 700])
        assert {each.body for each in frames} <= {bytes(1000)}
        kept.append(len(frames._buffer))
    assert max(kept) < HEADER_BYTES + 1000
    assert kept[-1] == 0


def test_a_large_body_is_put_together_in_linear_time():
    """64 MiB in pieces of 16 KiB: with a copy of all that is there for each piece it is 128 GiB."""
    body = bytes(64 << 20)
    data = memoryview(written([Frame(FrameKind.STRUCT, 1, body)]))
    step = 1 << 14
    (frame,) = read(data[at : at + step] for at in range(0, len(data), step))
    assert frame.body == body


@given(
    st.lists(
        st.builds(Frame, st.sampled_from(FrameKind), st.integers(0, 2**64 - 1), st.binary(max_size=300))
    ),
    st.lists(st.integers(1, 40), min_size=1),
)
def test_any_frames_survive_any_cut(frames, cuts):
    data, parts, at = written(frames), [], 0
    while at < len(data):
        step = cuts[len(parts) % len(cuts)]
        parts.append(data[at : at + step])
        at += step
    assert read(parts) == frames
