"""Every error PushKV raises on purpose.

All derive from :class:`PushKVError`, so that ``except PushKVError`` catches what the library
says and nothing else. A message is one sentence with the offending value, then what to do.
"""

from __future__ import annotations


class PushKVError(Exception):
    """Base of all errors raised by PushKV."""


class ConfigError(PushKVError):
    """A setting has an unknown name or a value out of range."""


class BackendError(PushKVError):
    """A memory backend is unknown, disabled, broken, or fails its own checks."""


class UnclaimedDevice(BackendError):
    """No memory backend claims the device that an array lives on."""


class GeometryError(PushKVError):
    """A cache geometry, block table or token range is malformed."""


class GeometryMismatch(GeometryError):
    """Two ranks' caches cannot be copied into one another."""


class ProtocolError(PushKVError):
    """A message is malformed, oversized, of another version, or foreign."""


class HandshakeError(PushKVError):
    """Two endpoints could not be connected."""


class HandshakeRefused(HandshakeError):
    """The peer answered the handshake with a refusal."""


class AddressError(HandshakeError):
    """An address cannot be bound, or cannot be reached by the peers it is meant for."""


class TransportError(PushKVError):
    """The data mover failed to do what it was asked."""


class TransportUnavailable(TransportError):
    """The data mover is missing, too old, or cannot be started."""


class RegistrationError(TransportError):
    """The data mover did not take the memory that is to be pushed."""


class PeerLost(TransportError):
    """The data mover says that the peer is gone. This is no proof that its WRITEs have ended."""


class NoSlots(PushKVError):
    """No landing slot is to be had before there is proof about those that are quarantined."""


class ForkedProcess(PushKVError):
    """An endpoint, or what it gave, is used in a child of the process that made it."""


class EndpointClosed(PushKVError):
    """The endpoint is closed or closing and takes nothing new."""


class BenchError(PushKVError):
    """A benchmark could not be run to its end, or its result cannot be drawn."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
