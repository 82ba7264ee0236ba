"""What crosses the control connection: the handshake, signs of life, and messages whose other way is broken."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from pushkv.core.compat import Factors
from pushkv.core.geometry import Geometry
from pushkv.core.memory import Region
from pushkv.core.messages import MAX_FRAME, OLDEST_VERSION, TOKEN_BYTES, VERSION, Count, Name, Seconds, Small, Text
from pushkv.errors import ProtocolError
from pushkv.transport.base import Host

MAX_CONTROL_FRAME = 16 << 20
_Token = Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
_Regions = Annotated[tuple[Region, ...], Meta(max_length=65536)]
_Metadata = Annotated[bytes, Meta(max_length=MAX_CONTROL_FRAME)]


class Slots(msgspec.Struct, frozen=True):
    """Slots for landing: ``count`` of ``size`` bytes each, the first at byte ``first`` of the region.

    ``only``: nothing but these is registered, so that no WRITE can reach the cache.
    """

    region: Region
    first: Count
    size: Annotated[int, Meta(gt=0, lt=2**48)]
    count: Annotated[int, Meta(gt=0, lt=2**31)]
    only: bool = False


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint, as the other gets to know it in the handshake."""

    oldest: Small = OLDEST_VERSION
    newest: Small = VERSION
    engine: Name
    rank: Small
    epoch: Name
    agent: Name
    geometry: Geometry
    factors: Factors
    regions: _Regions
    metadata: _Metadata
    host: Host | None
    verify: Name = "off"
    """How the bytes are verified; a side that does not say so cannot."""
    slots: Slots | None = None
    layers: bool = False
    """Whether a producer's engine says which layers of a step are written before the others are."""
    free_tail: bool = False
    """A consumer's: behind an offer's end its last block may be written."""


class Introduction(msgspec.Struct, frozen=True, tag="introduction"):
    """Consumer to producer: who I am, and the token that every message of this pair is to bear."""

    token: _Token
    side: Side


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Producer to consumer: we are connected, in this protocol version.

    ``fellows`` are the addresses of all ranks of the producer's engine, empty where it does not know them.
    """

    token: _Token
    version: Small
    side: Side
    fellows: Annotated[tuple[Name, ...], Meta(max_length=65536)] = ()


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Producer to consumer: we cannot be connected, and why."""

    token: _Token
    detail: Text


class Relay(msgspec.Struct, frozen=True, tag="relay"):
    """A message that would otherwise go as a NIXL notification."""

    frame: Annotated[bytes, Meta(max_length=MAX_FRAME)]


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """A sign of life; the producer answers the consumer's with its own."""

    token: _Token


class Knock(msgspec.Struct, frozen=True, tag="knock"):
    """There is a notification for you: look, should you have gone to sleep."""

    token: _Token


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """This side closes in good order: nothing of it is in flight or will be started."""

    token: _Token


class Moved(msgspec.Struct, frozen=True, tag="moved"):
    """Producer to consumer: I go on with another agent, or my way to yours is gone; introduce yourself again."""

    token: _Token


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """Producer to consumer: what a descriptor costs between us, in seconds, and the wire, in bytes a second."""

    token: _Token
    descriptor: Annotated[float, Meta(gt=0, lt=1e3)]
    wire: Annotated[float, Meta(gt=0, lt=1e15)]


class Fence(msgspec.Struct, frozen=True, tag="fence"):
    """An operator to an endpoint: rebuild your agent for the proof that gives."""

    limit: Seconds


class Fenced(msgspec.Struct, frozen=True, tag="fenced"):
    """The answer: whether nothing is quarantined any more, and what was seen."""

    clear: bool
    detail: Text


Control: TypeAlias = (
    Introduction | Welcome | Refusal | Relay | Alive | Knock | Bye | Moved | Measured | Fence | Fenced
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Control)


def pack(message: Control) -> bytes:
    """A control message as bytes."""
    return _encoder.encode(message)


def unpack(data: bytes) -> Control:
    """The control message in these bytes. Raises ProtocolError for anything malformed."""
    if len(data) > MAX_CONTROL_FRAME:
        raise ProtocolError(f"a control frame of {len(data)} bytes exceeds {MAX_CONTROL_FRAME}; drop it")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a control frame of {len(data)} bytes does not decode: {error}") from error


def check_verify(ours: Side, theirs: Side) -> None:
    """Raises ProtocolError naming both settings where the two sides would verify bytes differently."""
    if ours.verify != theirs.verify:
        raise ProtocolError(
            f"verify is {ours.verify!r} on this side and {theirs.verify!r} on the other: set it alike on both"
        )


def common_version(ours: tuple[int, int], theirs: tuple[int, int]) -> int:
    """The newest version both speak. Raises ProtocolError naming both ranges where there is none."""
    version = min(ours[1], theirs[1])
    if version < max(ours[0], theirs[0]):
        raise ProtocolError(
            f"this side speaks protocol versions {ours[0]} to {ours[1]}, the other {theirs[0]} to {theirs[1]}: "
            "upgrade the older one"
        )
    return version
