"""The messages of the push protocol and their encoding.

A frame is ``b"PKV"``, one version byte, the pair's 16-byte token and a msgpack body. Every message is a
tagged struct whose sizes are bounded when it is decoded, so that a hostile frame costs its own length at most.

Sequences number the offers of one consumer epoch to one producer epoch. ``floor`` is the consumer's word that
every offer below it is over and its memory out of reach: nothing with a lower sequence may be started any more.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from pushkv.core.outcome import Outcome
from pushkv.core.span import Span
from pushkv.errors import ProtocolError

VERSION = 1
OLDEST_VERSION = 1
MAX_FRAME = 4 << 20
TOKEN_BYTES = 16
_MAGIC = b"PKV"
_HEADER = len(_MAGIC) + 1 + TOKEN_BYTES

Name = Annotated[str, Meta(min_length=1, max_length=512)]
Text = Annotated[str, Meta(max_length=2048)]
Count = Annotated[int, Meta(ge=0, lt=2**53)]
Small = Annotated[int, Meta(ge=0, lt=2**31)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]
Nonce = Annotated[bytes, Meta(min_length=16, max_length=16)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Sum = Annotated[bytes, Meta(min_length=4, max_length=64)]
Spans = Annotated[tuple[Span, ...], Meta(max_length=4096)]


class TransferKey(msgspec.Struct, frozen=True, array_like=True):
    """What one transfer is: a router's dispatch, for one life of one consumer engine, one sibling, one attempt.

    Attempts compare only where all the fields before are equal (:attr:`base`).
    """

    transfer: Name
    engine: Name
    epoch: Name
    sibling: Small = 0
    attempt: Small = 0

    @property
    def base(self) -> tuple[str, str, str, int]:
        """The key without its attempt."""
        return (self.transfer, self.engine, self.epoch, self.sibling)

    def __str__(self) -> str:
        return f"{self.transfer}/{self.engine}@{self.epoch}/{self.sibling}.{self.attempt}"


class Table(msgspec.Struct, frozen=True, array_like=True):
    """A request's blocks of one cache group: logical block ``first`` and on, ids as little-endian int32."""

    first: Small
    ids: Annotated[bytes, Meta(max_length=MAX_FRAME)]


class Blocks(msgspec.Struct, frozen=True, array_like=True, tag="blocks"):
    """Parts land in the consumer's blocks themselves; one table a cache group."""

    tables: Annotated[tuple[Table, ...], Meta(max_length=256)]


class Credit(msgspec.Struct, frozen=True, array_like=True):
    """The right to WRITE one landing slot once: a returned slot comes back under another generation."""

    slot: Small
    generation: Count


class Ring(msgspec.Struct, frozen=True, array_like=True, tag="ring"):
    """Parts land in slots of the consumer's landing ring; these blocks say in which order a part is packed."""

    tables: Annotated[tuple[Table, ...], Meta(max_length=256)]


class Offer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """Consumer to producer: WRITE tokens ``start`` to ``stop`` of this prompt there.

    ``prompt`` is the digest of what the KV is computed from over ``prompt_tokens`` tokens; ``remaining`` is what
    is left of the consumer's deadline and ``lease`` how long the producer may start something unless renewed.
    ``siblings`` is how many offers of this transfer the consumer's engine has for this producer rank, 0 if it does
    not say.
    """

    key: TransferKey
    sequence: Count
    floor: Count
    nonce: Nonce
    prompt: Digest
    prompt_tokens: Small
    start: Small
    stop: Small
    into: Blocks | Ring
    remaining: Seconds
    lease: Seconds
    siblings: Small = 0


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Consumer to producer: start nothing more for this offer; always answered, by Drained or by Failed.

    ``siblings`` as in the offer: a consumer that wants nothing sends this alone.
    """

    key: TransferKey
    sequence: Count
    outcome: Outcome
    siblings: Small = 0


class Renew(msgspec.Struct, frozen=True, array_like=True, tag="renew"):
    """Consumer to producer: all my open offers stand for another ``lease`` seconds."""

    floor: Count
    lease: Seconds


class Grant(msgspec.Struct, frozen=True, array_like=True, tag="grant"):
    """Consumer to producer: a landing slot for that part. Said again where a Ready comes again."""

    sequence: Count
    part: Small
    credit: Credit


class Ack(msgspec.Struct, frozen=True, array_like=True, tag="ack"):
    """Producer to consumer: the offer has been seen (it need not be resent)."""

    sequence: Count


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Producer to consumer: parts 0 to ``parts`` - 1 of this offer have (had) a staging slot and want a landing slot.

    Resent until each has its Grant.
    """

    sequence: Count
    parts: Small


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Producer to consumer: the transfer will not complete. Never a proof; resent until answered by Cancel.

    ``stuck`` says that a WRITE failed whose bytes may still travel: Drained will not come, look for other proof.
    """

    key: TransferKey
    sequence: Count
    outcome: Outcome
    detail: Text
    stuck: bool = False


class Drained(msgspec.Struct, frozen=True, array_like=True, tag="drained"):
    """Producer to consumer: for this offer no WRITE is in flight and none will be posted. A proof."""

    key: TransferKey
    sequence: Count


class Complete(msgspec.Struct, frozen=True, array_like=True, tag="complete"):
    """Rides on each WRITE as its notification: these spans have landed.

    ``whole`` comes with the last part and says what all parts together cover. ``digest`` is that of the part's source
    bytes in the order of :mod:`pushkv.core.digest`, where the two sides have agreed to verify them.
    """

    nonce: Nonce
    rank: Small
    epoch: Name
    part: Small
    spans: Spans
    whole: Spans | None = None
    credit: Credit | None = None
    digest: Sum | None = None


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A warm-up: it rides on the WRITE that opens a path, and answers it the other way."""

    agent: Name


ToProducer: TypeAlias = Offer | Cancel | Renew | Grant
ToConsumer: TypeAlias = Ack | Ready | Failed | Drained | Complete
Message: TypeAlias = ToProducer | ToConsumer | Hello

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(token: bytes, message: Message) -> bytes:
    """The frame of a message for the pair with this token. Raises ProtocolError when it is too large to send."""
    frame = _MAGIC + bytes((VERSION,)) + token + _encoder.encode(message)
    if len(frame) > MAX_FRAME:
        raise ProtocolError(
            f"a {type(message).__name__} of {len(frame)} bytes exceeds the limit of {MAX_FRAME}: "
            "offer fewer blocks at once"
        )
    return frame


def token_of(frame: bytes) -> bytes:
    """The pair's token of a frame, read before anything else is decoded. Raises ProtocolError."""
    if len(frame) < _HEADER or len(frame) > MAX_FRAME or not frame.startswith(_MAGIC):
        raise ProtocolError(f"a frame of {len(frame)} bytes is not PushKV's; drop it")
    version = frame[len(_MAGIC)]
    if not OLDEST_VERSION <= version <= VERSION:
        raise ProtocolError(f"a frame of version {version}; this side speaks {OLDEST_VERSION} to {VERSION}")
    return frame[len(_MAGIC) + 1 : _HEADER]


def decode(frame: bytes) -> Message:
    """The message in a frame. Raises ProtocolError for anything malformed, whatever it is."""
    token_of(frame)
    try:
        return _decoder.decode(memoryview(frame)[_HEADER:])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a frame of {len(frame)} bytes does not decode: {error}") from error
