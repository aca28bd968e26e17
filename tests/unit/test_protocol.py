"""Messages survive the way; bytes that are none are refused by the sender's name, and never unpickled."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import pickle
import threading
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import example, given
from hypothesis import strategies as st
from lanes import examples

from nblaunch._runtime_dir import RuntimeDirectory
from nblaunch.host.hub import Hub
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol import messages
from nblaunch.protocol import messages as wire

FROM_RANK = typing.get_args(wire.FromRank)
TO_RANK = typing.get_args(wire.ToRank)

# --- any message at all ----------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
PLAIN = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: TEXT,
    bytes: st.binary(max_size=20),
    bool: st.booleans(),
    type(None): st.none(),
    Any: JSON,
    # Options check each other, and what they allow has tests of its own.
    LaunchOptions: st.builds(
        LaunchOptions,
        env=st.dictionaries(st.sampled_from("ABC"), st.sampled_from(["", "b=c", "ü"])),
        grace=st.floats(0, 1e6),
        ranks=st.sampled_from([None, (0, 2)]),
        out=st.sampled_from([None, "losses"]),
    ),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Return any value of a field, so that no message and no field can be forgotten here."""
    if kind in PLAIN:
        return PLAIN[kind]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return st.builds(
            kind, **{each.name: values_of(hints[each.name]) for each in dataclasses.fields(kind)}
        )
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{name: values_of(hints[name]) for name in kind.__struct_fields__})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values_of(each) for each in arguments])
    if origin is tuple and arguments[-1] is ...:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*[values_of(each) for each in arguments])
    assert origin is dict, kind
    return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=3)


ANY_FROM_RANK = st.one_of([values_of(each) for each in FROM_RANK])


def test_every_message_is_in_a_union():
    """A message that is in none could be sent, and would be refused."""
    bases = {each.__mro__[1] for each in FROM_RANK if each.__mro__[1] is not msgspec.Struct}
    tagged = {
        each
        for each in vars(messages).values()
        if isinstance(each, type)
        and issubclass(each, msgspec.Struct)
        and each.__struct_config__.tag is not None
    }
    jobs = ("CellJob", "FunctionJob", "ScriptJob", "PushJob", "PullJob")
    inside = {getattr(messages, name) for name in jobs}
    assert tagged - bases - {messages._OfRank} - inside == {
        *FROM_RANK,
        *TO_RANK,
        *typing.get_args(wire.AboutRank),
    }


@pytest.mark.parametrize("kind", FROM_RANK, ids=lambda kind: kind.__name__)
@given(data=st.data())
@examples(30)
def test_what_a_rank_says_arrives_as_it_was_said(kind, data):
    message = data.draw(values_of(kind))
    assert wire.decode_from_rank(wire.encode(message), "rank 0") == message


@pytest.mark.parametrize("kind", TO_RANK, ids=lambda kind: kind.__name__)
@given(data=st.data())
@examples(30)
def test_what_a_rank_is_told_arrives_as_it_was_told(kind, data):
    message = data.draw(values_of(kind))
    assert wire.decode_to_rank(wire.encode(message), "the hub") == message


@given(ANY_FROM_RANK)
@examples(50)
def test_messages_are_values_that_nobody_can_change(message):
    with pytest.raises(AttributeError):
        message.rank = 7


# --- bytes that are no message -----------------------------------------------------------------------


def boom(path: str) -> None:
    Path(path).touch()


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return boom, (str(self.path),)


NESTED = [b"\x91" * 100_000, b"\x81\xa1a" * 100_000, b"\x91" * 10 + b"\xc0"]
LIES = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"]
WRONG = [
    b"",
    b"\xc0",
    b"hello",
    msgspec.msgpack.encode({"type": "Nothing", "rank": 0}),
    msgspec.msgpack.encode({"type": "Hello", "rank": 0}),
    msgspec.msgpack.encode({"type": "Leave", "exitcode": "no"}),
    msgspec.msgpack.encode({"type": 7, "rank": 0}),
    msgspec.msgpack.encode({"rank": 0}),
    msgspec.msgpack.encode({"type": "Entered", "rank": "0", "phase": "job"}),
    msgspec.msgpack.encode({"type": "Entered", "rank": 0, "phase": "no phase"}),
    msgspec.msgpack.encode(["Entered", 0, "job"]),
    msgspec.json.encode({"type": "Entered", "rank": 0, "phase": "job"}),
    wire.encode(wire.Entered(rank=0, phase=wire.Phase.JOB)) + b"\x00",
    b"\x83\xa4type\xa7Entered\xa4rank\x00\xa5phase\xa3\xff\xfe\xfd",
]


@pytest.mark.parametrize("decode", [wire.decode_from_rank, wire.decode_to_rank])
@pytest.mark.parametrize("data", [*WRONG, *NESTED, *LIES], ids=lambda data: repr(data[:24]))
def test_bytes_that_are_no_message_are_refused_by_the_senders_name(decode, data):
    with pytest.raises(wire.ProtocolError, match="from rank 3 of somewhere") as caught:
        decode(data, "rank 3 of somewhere")
    assert str(len(data)) in str(caught.value)
    assert len(str(caught.value)) < 2000


@given(st.binary(max_size=200))
@example(pickle.dumps({"a": 1}))
def test_random_bytes_are_a_message_or_refused(data):
    """Never anything else: the hub's thread has no other error to expect."""
    try:
        message = wire.decode_from_rank(data, "someone")
    except wire.ProtocolError:
        return
    assert isinstance(message, FROM_RANK)


@given(ANY_FROM_RANK, st.data())
def test_a_truncated_message_is_refused(message, data):
    whole = wire.encode(message)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(wire.ProtocolError):
        wire.decode_from_rank(whole[:cut], "someone")


@given(ANY_FROM_RANK, st.data())
def test_a_message_with_a_flipped_byte_is_a_message_or_refused(message, data):
    whole = bytearray(wire.encode(message))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(wire.ProtocolError):
        assert isinstance(wire.decode_from_rank(bytes(whole), "someone"), FROM_RANK)


def test_decoding_unpickles_nothing(tmp_path):
    bomb = pickle.dumps(Bomb(tmp_path / "went-off"))
    with pytest.raises(wire.ProtocolError):
        wire.decode_from_rank(bomb, "someone")
    payload = messages.Payload(sizes=(len(bomb),), inline=bomb)
    assert (
        wire.decode_from_rank(wire.encode(wire.Returned(rank=0, value=payload, time=0.0)), "someone").rank
        == 0
    )
    assert list(tmp_path.iterdir()) == []


# --- the hub ---------------------------------------------------------------------------------------


class Group:
    """Stands where a worker group stands, and writes down what it is given."""

    group, token, attempt = "a1b2c3d4", "the right token", 1
    quiet = False

    def __init__(self):
        self.received = []
        self.ticks = 0

    def receive(self, message, data):
        assert wire.decode_from_rank(data, "a rank") == message
        self.received.append(message)

    def tick(self, now):
        self.ticks += now > 0


WRONG_TOKENS = ["a wrong token", "", "é"]


def hello(rank=0, **changes):
    said = {
        "token": Group.token,
        "attempt": Group.attempt,
        "local_rank": rank,
        "world_size": 2,
        "node": "n",
        "pid": 1,
    }
    return wire.Hello(rank=rank, **{**said, **changes})


@pytest.fixture
def hub():
    """Run a hub of the test's own, in a directory of its own."""
    directory = RuntimeDirectory()
    running = Hub(directory)
    yield running
    running.close()
    directory.remove()


@pytest.fixture
def group(hub):
    member = Group()
    hub.add(member)
    return member


@pytest.fixture
def connect(hub):
    """Give `connect(identity)`: a socket such as a rank has."""
    context, made_so_far = zmq.Context(), []

    def make(identity: str = f"{Group.group}/{Group.attempt}/0") -> Any:
        made = context.socket(zmq.DEALER)
        made_so_far.append(made)
        made.setsockopt(zmq.IDENTITY, identity.encode())
        made.connect(hub.address)
        return made

    yield make
    context.destroy(linger=0)


@pytest.fixture
def refusals(caplog):
    """Give the lines that the hub has logged."""
    caplog.set_level(logging.WARNING, logger="nblaunch")
    return lambda: [record.getMessage() for record in caplog.records]


def on_the_hubs_thread(hub, action):
    """Run `action` there, and wait until it has."""
    done = threading.Event()
    hub.call(action)
    hub.call(done.set)
    assert done.wait(10)


def test_a_rank_that_says_hello_with_the_token_is_heard_and_can_be_told(hub, group, connect, eventually):
    rank = connect()
    rank.send(wire.encode(hello()))
    rank.send(wire.encode(wire.Entered(rank=0, phase=wire.Phase.READY)))
    eventually(lambda: len(group.received) == 2, "both messages are here")
    assert group.received == [hello(), wire.Entered(rank=0, phase=wire.Phase.READY)]
    on_the_hubs_thread(hub, lambda: hub.send(group, 0, wire.Leave(exitcode=3)))
    assert rank.poll(10_000)
    assert wire.decode_to_rank(rank.recv(), "the hub") == wire.Leave(exitcode=3)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"garbage", "no message"),
        (pickle.dumps([1, 2, 3]), "no message"),
        (NESTED[0], "no message"),
        (LIES[0], "no message"),
        (wire.encode(hello())[:-3], "no message"),
        (wire.encode(wire.Entered(rank=0, phase=wire.Phase.JOB)), "did not say hello"),
        *((wire.encode(hello(token=each)), "did not say hello") for each in WRONG_TOKENS),
        (wire.encode(hello(rank=1)), "did not say hello"),
        (wire.encode(hello(attempt=0)), "did not say hello"),
    ],
    ids=[
        *("garbage", "pickle", "nested", "lie", "truncated", "no-hello"),
        *("token", "no-token", "text", "rank", "attempt"),
    ],
)
def test_a_stranger_is_refused_and_told_of_once(  # noqa: PLR0913, PLR0917 - four are fixtures
    group, connect, refusals, eventually, said, why
):
    stranger = connect()
    for _ in range(3):
        stranger.send(said)
    stranger.send(wire.encode(hello()))  # only now it is a rank, and all before has been looked at
    eventually(lambda: group.received, "the hello is here")
    assert group.received == [hello()]
    (line,) = refusals()
    assert why in line
    assert f"{Group.group}/{Group.attempt}/0" in line


@pytest.mark.parametrize(
    "identity",
    [
        *(f"{Group.group}/{attempt}/0" for attempt in (0, 2)),
        *("unknown0/1/0", "no-slashes", "a/b/c", "a/1/0/0", "\x00\x01"),
    ],
)
def test_what_is_of_no_present_attempt_is_passed_over(group, connect, eventually, identity):
    stranger = connect(identity)
    rank = connect()
    for _ in range(3):
        stranger.send(wire.encode(hello()))
    eventually(lambda: rank.send(wire.encode(hello())) or group.received, "the rank is heard")
    assert {type(each) for each in group.received} == {wire.Hello}
    assert group.ticks >= 0


def test_a_rank_cannot_speak_for_another(group, connect, refusals, eventually):
    rank = connect()
    rank.send(wire.encode(hello()))
    rank.send(wire.encode(wire.Entered(rank=1, phase=wire.Phase.READY)))
    rank.send(wire.encode(wire.Entered(rank=0, phase=wire.Phase.READY)))
    eventually(lambda: len(group.received) == 2, "the rank's own messages are here")
    assert [each.rank for each in group.received] == [0, 0]
    (line,) = refusals()
    assert "spoke for rank 1" in line


def test_a_second_socket_with_a_ranks_name_is_not_heard(group, connect, eventually):
    rank, thief = connect(), None
    rank.send(wire.encode(hello()))
    eventually(lambda: group.received, "the rank is known")
    thief = connect()
    for _ in range(10):
        thief.send(wire.encode(wire.Entered(rank=0, phase=wire.Phase.LEAVE)))
    rank.send(wire.encode(wire.Entered(rank=0, phase=wire.Phase.READY)))
    eventually(lambda: len(group.received) == 2, "the rank is heard")
    assert group.received[1] == wire.Entered(rank=0, phase=wire.Phase.READY)


def test_a_rank_that_is_faster_than_the_news_of_its_group_is_heard(hub, connect, eventually):
    late, begun, reached = Group(), threading.Event(), threading.Event()

    def drain_first():
        begun.set()
        assert reached.wait(10)
        assert hub._socket.poll(10_000)
        hub.drain()

    hub.call(drain_first)
    assert begun.wait(10)  # else the thread may wake up to the message, and have received it by then
    rank = connect()
    rank.send(wire.encode(hello()))
    hub.add(late)  # waits in the queue behind what is at work, as the message does
    try:
        reached.set()
        eventually(lambda: late.received == [hello()], "the hello is here")
    finally:
        hub.remove(late)


def test_a_defect_in_one_group_does_not_end_the_thread_that_serves_all(
    hub, group, connect, refusals, eventually
):
    class Broken(Group):
        group = "broken00"

        def receive(self, message, _data):
            1 / message.rank

    broken = Broken()
    hub.add(broken)
    bad, good = connect("broken00/1/0"), connect()
    bad.send(wire.encode(hello()))
    eventually(lambda: any("please report" in line for line in refusals()), "the defect is logged")
    good.send(wire.encode(hello()))
    eventually(lambda: group.received, "the other group is served")


def test_what_waits_for_the_hubs_thread_may_run_on_it(hub):
    order = []

    def outer():
        hub.run(lambda: order.append("inner"), 10)
        order.append("outer")

    hub.run(outer, 10)
    assert order == ["inner", "outer"]


def test_after_a_group_is_removed_its_ranks_are_strangers(hub, group, connect, eventually):
    rank = connect()
    rank.send(wire.encode(hello()))
    eventually(lambda: group.received, "the rank is known")
    hub.remove(group)
    rank.send(wire.encode(wire.Entered(rank=0, phase=wire.Phase.READY)))
    on_the_hubs_thread(hub, lambda: None)
    hub.add(group)
    on_the_hubs_thread(hub, lambda: None)
    rank.send(wire.encode(wire.Entered(rank=0, phase=wire.Phase.LEAVE)))
    rank.send(wire.encode(hello()))
    eventually(lambda: group.received[-1] == hello() and len(group.received) >= 2, "it has said hello anew")
    assert wire.Entered(rank=0, phase=wire.Phase.LEAVE) not in group.received


def test_the_hubs_socket_is_for_the_user_alone(hub):
    directory = Path(hub.address.removeprefix("ipc://")).parent
    assert directory.stat().st_mode & 0o077 == 0
