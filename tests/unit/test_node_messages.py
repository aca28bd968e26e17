"""Messages between the runtime and nodes survive the way, and each is in a union."""

from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples
from test_protocol import values_of

from nblaunch.host import wire
from nblaunch.host.wire import FromNode, ToNode, decode_from_node, decode_to_node, encode

FROM_NODE, TO_NODE = typing.get_args(FromNode), typing.get_args(ToNode)


def test_every_message_is_in_a_union():
    tagged = {
        each
        for each in vars(wire).values()
        if isinstance(each, type)
        and issubclass(each, msgspec.Struct)
        and each.__struct_config__.tag is not None
        and each.__module__ == wire.__name__
    }
    assert tagged == {*FROM_NODE, *TO_NODE}


@pytest.mark.parametrize("kind", FROM_NODE, ids=lambda kind: kind.__name__)
@given(data=st.data())
@examples(20)
def test_what_a_node_sends_arrives_as_it_was_sent(kind, data):
    message = data.draw(values_of(kind))
    assert decode_from_node(encode(message)) == message


@pytest.mark.parametrize("kind", TO_NODE, ids=lambda kind: kind.__name__)
@given(data=st.data())
@examples(20)
def test_what_a_node_is_sent_arrives_as_it_was_sent(kind, data):
    message = data.draw(values_of(kind))
    assert decode_to_node(encode(message)) == message
