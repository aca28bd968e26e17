"""What a client and its runtime send arrives as it was sent; an error arrives as what it was."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec
import pytest

from nblaunch import _errors
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol import client
from nblaunch.protocol import client as wire
from nblaunch.protocol.messages import Noticed, ProtocolError, encode


def answers_of(request: Any) -> tuple[type[wire.AnswerToClient], ...]:
    """Return what may answer a request, besides its failure."""
    ((answer,),) = (typing.get_args(base) for base in request.__orig_bases__)
    return typing.get_args(answer) or (() if answer is typing.Never else (answer,))


def decode_answer_to(request: Any, data: bytes, sender: str) -> Any:
    return wire.decode_answer(data, request, sender)


UNIONS: dict[type, Callable[[bytes, str], Any]] = {
    **dict.fromkeys(typing.get_args(wire.ClientRequest), wire.decode_request),
    **dict.fromkeys(typing.get_args(wire.ClientNote), wire.decode_note),
    **{
        cast("type", answer): functools.partial(decode_answer_to, request)
        for request in typing.get_args(wire.ClientRequest)
        for answer in answers_of(request)
    },
    wire.RequestFailed: functools.partial(decode_answer_to, wire.Stop),
    **dict.fromkeys(typing.get_args(wire.RuntimeEvent), wire.decode_event),
}
"""Every message, and what decodes it."""

# As Python has the name of a file that is not UTF-8.
NO_UTF8 = "a\udcff"

PLAIN: dict[Any, Any] = {
    int: 7,
    float: 1.5,
    str: "ü",
    bytes: b"\0\xff",
    bool: True,
    Any: {"phase": "rendezvous", "size": 3},
    LaunchOptions: LaunchOptions(
        nproc_per_node=3,
        env={"A": "b=c"},
        timeout=4.5,
        local_ranks_filter=(0, 2),
        pull=("x",),
        backend="gloo",
    ),
}


def sample(kind: Any, text: str) -> Any:
    """Return a value of a field, never an empty one; all its text is `text`."""
    if kind is str:
        return text
    if kind in PLAIN:
        return PLAIN[kind]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return list(kind)[-1]
    if isinstance(kind, type) and (issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind)):
        return built(kind, text)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return sample(next(each for each in arguments if each is not types.NoneType), text)
    if origin is tuple:
        return tuple(sample(each, text) for each in arguments if each is not ...)
    assert origin in (dict, Mapping), kind
    return {sample(arguments[0], text): sample(arguments[1], text)}


def built(kind: Any, text: str) -> Any:
    """Return a message of which no field has its default."""
    values = {}
    for name, hint in typing.get_type_hints(kind).items():
        values[name] = sample(hint, text)
        if hint is bool and getattr(kind, "__struct_config__", None) is not None:
            default = next(each.default for each in msgspec.structs.fields(kind) if each.name == name)
            values[name] = default is not True
    return kind(**values)


@pytest.mark.parametrize("text", ["ü", NO_UTF8], ids=["text", "no UTF-8"])
@pytest.mark.parametrize("kind", UNIONS, ids=lambda kind: kind.__name__)
def test_a_message_arrives_as_it_was_sent(kind, text):
    message = built(kind, text)
    defaults = {each.name: each.default for each in msgspec.structs.fields(kind)}
    assert [name for name, default in defaults.items() if getattr(message, name) == default] == []
    assert UNIONS[kind](encode(message), "a client") == message


def test_every_message_is_in_one_union():
    tagged = {
        each
        for each in vars(client).values()
        if isinstance(each, type)
        and issubclass(each, msgspec.Struct)
        and each.__module__ == client.__name__
        and each.__struct_config__.tag is not None
        and not each.__name__.startswith("_")
    }
    assert tagged - {client.Request, wire.AnswerToClient} == UNIONS.keys() - {Noticed}
    unions = [set(typing.get_args(each)) for each in (wire.ClientRequest, wire.ClientNote, wire.RuntimeEvent)]
    answers = set(wire.AnswerToClient.__subclasses__())
    assert len(UNIONS) == sum(map(len, (*unions, answers)))


def test_an_answer_to_another_request_is_refused():
    with pytest.raises(ProtocolError, match="the runtime"):
        wire.decode_answer(encode(wire.Done()), wire.OpenRanks, "the runtime")


@pytest.mark.parametrize(
    "decode",
    [
        wire.decode_request,
        wire.decode_note,
        functools.partial(decode_answer_to, wire.Stop),
        wire.decode_event,
    ],
)
@pytest.mark.parametrize(
    "data", [b"", b"\xc1", encode(wire.RequestFailed(error=wire.ErrorRecord("a.b", "c")))[:-1]]
)
def test_bytes_that_are_no_message_are_refused_by_the_senders_name(decode, data):
    with pytest.raises(ProtocolError, match="client 7"):
        decode(data, "client 7")


# --- errors ----------------------------------------------------------------------------------------


class ForeignError(Exception):
    """An exception of the user's."""


OURS = [
    each
    for each in vars(_errors).values()
    if isinstance(each, type) and issubclass(each, _errors.NblaunchError)
]
MADE_WITH: dict[type, dict[str, Any]] = {
    _errors.CaptureError: {"name": "model", "path": "model.trainer._lock", "size": 12},
    _errors.LaunchError: {"phase": "rendezvous"},
}


def sent(error: BaseException) -> BaseException:
    """Return an error as it is on the other side."""
    answer = wire.decode_answer(
        encode(wire.RequestFailed(error=wire.ErrorRecord.of(error))), wire.Stop, "the runtime"
    )
    assert isinstance(answer, wire.RequestFailed)
    return answer.error.error()


@pytest.mark.parametrize(
    "message", ["no", NO_UTF8, "x" * 2 * _errors.MESSAGE_LIMIT], ids=["", "UTF-8", "long"]
)
@pytest.mark.parametrize("kind", OURS)
def test_an_error_of_ours_arrives_with_its_fields(kind, message):
    error = kind(message, **MADE_WITH.get(kind, {}))
    arrived = sent(error)
    assert (type(arrived), str(arrived)) == (kind, str(error))
    assert vars(arrived) == vars(error)


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit("over"), OSError("out")])
def test_an_error_of_pythons_arrives_as_itself(error):
    arrived = sent(error)
    assert (type(arrived), str(arrived)) == (type(error), str(error))


@pytest.mark.parametrize("path", ["/nowhere/at all", NO_UTF8])
def test_an_error_of_the_system_keeps_its_class_and_its_text(path):
    with pytest.raises(FileNotFoundError) as caught:
        open(path)  # noqa: PTH123, SIM115 - it is not there
    arrived = sent(caught.value)
    assert type(arrived) is FileNotFoundError
    assert str(arrived) == str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        ForeignError("mine"),
        KeyError("x"),  # whose text is the repr of what it is made of
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),  # which takes five arguments
        ExceptionGroup("several", [ValueError("one")]),
    ],
)
def test_any_other_error_arrives_as_a_text_that_names_it(error):
    arrived = sent(error)
    assert type(arrived) is RuntimeError
    assert str(arrived) == f"{type(error).__qualname__}: {error}"


@pytest.mark.parametrize("type_", ["builtins.eval", "nblaunch._errors.shorten", "os.system", "", "builtins."])
def test_what_is_no_exception_is_never_called(type_):
    assert type(wire.ErrorRecord(type_, "1").error()) is RuntimeError
