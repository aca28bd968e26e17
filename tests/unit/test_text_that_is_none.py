"""File names need not be text: messages carry them all the same."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from nblaunch.protocol import messages as wire

STRANGE = os.fsdecode(b"/home/jos\xe9")
texts = st.text(st.characters(exclude_categories=["Co"]))


def test_an_order_with_file_names_of_any_bytes_arrives_as_it_was_sent():
    order = wire.Dispatch(
        job=wire.ScriptJob(name="train.py", path=f"{STRANGE}/train.py", args=(STRANGE,)),
        payload=wire.Payload(sizes=(3,), inline=b"\xff\xc1\x00"),
        sources={STRANGE: ("Cell In[1]", "pass")},
    )
    assert wire.decode_to_rank(wire.encode(order), "test") == order
    prepare = wire.Prepare(
        environ=(b"A=\xff",), cwd=os.fsencode(STRANGE), path=(), limits=(("RLIMIT_CPU", -1, -1),)
    )
    assert wire.decode_to_rank(wire.encode(prepare), "test") == prepare


@given(texts, texts)
def test_any_text_of_a_rank_arrives_as_it_was_sent(first, second):
    message = wire.Displayed(rank=3, data={"text/plain": first}, metadata={second: [first, 1.5, None]})
    assert wire.decode_from_rank(wire.encode(message), "test") == message


def test_what_has_no_such_text_is_encoded_as_ever():
    message = wire.Where(rank=0, frames=())
    assert not wire.encode(message).startswith(b"\xc1")
