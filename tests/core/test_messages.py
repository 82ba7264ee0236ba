"""Frames: what is sent comes back, and whatever else comes is a ProtocolError."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol import TOKENS, blocks, complete, key, offer, owed

from pushkv.core.messages import (
    MAX_FRAME,
    TOKEN_BYTES,
    VERSION,
    Ack,
    Cancel,
    Complete,
    Credit,
    Drained,
    Failed,
    Grant,
    Hello,
    Message,
    Ready,
    Renew,
    Ring,
    Table,
    decode,
    encode,
    token_of,
)
from pushkv.core.outcome import Outcome
from pushkv.errors import ProtocolError

TOKEN = bytes(range(TOKEN_BYTES))
MESSAGES: tuple[Message, ...] = (
    offer(),
    msgspec.structs.replace(offer(), into=Ring(offer().into.tables)),
    Cancel(key(), 1, Outcome.EXPIRED),
    Renew(3, 10.0),
    Grant(1, 0, Credit(4, 5)),
    Ack(1),
    Ready(1, 3),
    Failed(key(), 1, Outcome.REJECTED_PROMPT, "another digest", True),
    Drained(key(), 1),
    complete(b"n" * 16, 0, 0, TOKENS, (0, TOKENS)),
    Hello("agent"),
)


def body(value: object) -> bytes:
    """A frame of this pair whose body is any msgpack value."""
    return b"PKV" + bytes((VERSION,)) + TOKEN + msgspec.msgpack.encode(value)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
class TestEveryMessage:
    def test_comes_back_as_it_was(self, message: Message) -> None:
        frame = encode(TOKEN, message)
        assert decode(frame) == message
        assert token_of(frame) == TOKEN

    def test_cut_short_anywhere_is_an_error(self, message: Message) -> None:
        frame = encode(TOKEN, message)
        for length in range(len(frame)):
            with pytest.raises(ProtocolError):
                decode(frame[:length])

    def test_with_one_byte_changed_is_a_message_or_an_error(self, message: Message) -> None:
        frame = bytearray(encode(TOKEN, message))
        for index in range(len(frame)):
            for value in (0x00, 0x7F, 0x90, 0xC1, 0xDF, 0xFF):
                changed = frame.copy()
                changed[index] = value
                decode_or_refuse(bytes(changed))

    def test_with_a_field_of_another_type_is_an_error(self, message: Message) -> None:
        fields = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
        for index in range(1, len(fields)):
            changed = [*fields[:index], {"not": "this"}, *fields[index + 1 :]]
            with pytest.raises(ProtocolError):
                decode(body(changed))


def decode_or_refuse(frame: bytes) -> None:
    """Nothing but ProtocolError may come of a frame."""
    with contextlib.suppress(ProtocolError):
        decode(frame)


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes(frame: bytes) -> None:
    decode_or_refuse(frame)
    decode_or_refuse(b"PKV" + bytes((VERSION,)) + TOKEN + frame)


_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=40)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=20,
)
_tags = st.sampled_from(
    ["offer", "cancel", "renew", "grant", "ack", "ready", "failed", "drained", "complete", "hello"]
)


@settings(max_examples=400, deadline=None)
@given(_tags | st.text(max_size=8), st.lists(_values, max_size=13))
def test_random_fields_under_known_and_unknown_tags(tag: str, fields: list[object]) -> None:
    decode_or_refuse(body([tag, *fields]))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"PKV",
        b"GET / HTTP/1.1\r\n\r\n" + bytes(40),
        b"PKV" + bytes((0,)) + TOKEN + msgspec.msgpack.encode(Ack(1)),
        b"PKV" + bytes((VERSION + 1,)) + TOKEN + msgspec.msgpack.encode(Ack(1)),
        body(["unknown", 1]),
        body([]),
        body({"type": "ack"}),
        body(7),
        body(["ack", -1]),
        body(["ack", 2**53]),
        body(["ack"]),
        body(["hello", ""]),
        body(["hello", "x" * 513]),
        body(["renew", 1, float("nan")]),
        body(["renew", 1, 1e9]),
        body(["complete", b"short", 0, "p0", 0, []]),
        body(["complete", b"n" * 16, 0, "p0", 0, [[0, 0, 1, 0, 1]] * 4097]),
        body(["cancel", ["t", "e", "c", 0, 0], 1, "no such outcome"]),
        b"PKV" + bytes((VERSION,)) + TOKEN + b"\x91" * 100_000,
        b"PKV" + bytes((VERSION,)) + TOKEN + bytes(MAX_FRAME),
    ],
    ids=range(21),
)
def test_what_no_peer_of_ours_would_send(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(frame)


def test_extra_bytes_after_a_message() -> None:
    with pytest.raises(ProtocolError, match="does not decode"):
        decode(encode(TOKEN, Ack(1)) + b"\x00")


def test_a_frame_too_large_is_not_sent() -> None:
    large = msgspec.structs.replace(blocks(), tables=(Table(0, bytes(MAX_FRAME)),))
    with pytest.raises(ProtocolError, match="offer fewer blocks"):
        encode(TOKEN, msgspec.structs.replace(offer(), into=large))


def test_the_token_is_read_without_decoding() -> None:
    assert token_of(b"PKV" + bytes((VERSION,)) + TOKEN + b"\xc1") == TOKEN


def test_a_key_in_words_and_its_base() -> None:
    assert str(key(3)) == "t/engine@c0/0.3"
    assert key(3).base == key(4).base != key(3, sibling=1).base


def test_a_complete_says_what_the_whole_covers() -> None:
    last = decode(encode(TOKEN, complete(b"n" * 16, 1, 4, 8, (0, 8))))
    assert isinstance(last, Complete)
    assert last.whole == owed(0, 8)
