"""NIXL's exceptions in PushKV's words.

NIXL raises twelve classes that share no base below ``Exception``; they are told apart by name, so
that a version with fewer of them works as well.
"""

from __future__ import annotations

from types import ModuleType

from pushkv.errors import PeerLost, TransportError

PEER_LOST = frozenset({"nixlRemoteDisconnectError"})

MEANING = {
    "nixlBackendError": "the backend failed; NIXL_LOG_LEVEL=INFO and UCX_LOG_LEVEL=info say why",
    "nixlCancelledError": "it was cancelled",
    "nixlInvalidParamError": "an argument is out of range; check the indices and lengths",
    "nixlMismatchError": "the data does not fit; check that both sides run the same NIXL and backend",
    "nixlNoTelemetryError": "telemetry is off; set capture_telemetry",
    "nixlNotAllowedError": "the name belongs to another life of that agent; remove the peer first",
    "nixlNotFoundError": "the peer, the memory or the backend is unknown; add the peer and register the memory first",
    "nixlNotPostedError": "it was never posted",
    "nixlNotSupportedError": "the backend cannot do this",
    "nixlRemoteDisconnectError": "the peer is gone; connect to its successor",
    "nixlRepostActiveError": "it is still in flight",
    "nixlUnknownError": "NIXL does not say why; NIXL_LOG_LEVEL=INFO may",
}
"""What each class of ``_bindings`` means to the caller."""


def nixl_errors(bindings: ModuleType) -> tuple[type[Exception], ...]:
    """The exception classes of these bindings, for an ``except`` clause."""
    found = (getattr(bindings, name, None) for name in MEANING)
    return tuple(error for error in found if isinstance(error, type) and issubclass(error, Exception))


def is_peer_lost(error: Exception) -> bool:
    """Whether this exception of NIXL's says that the peer is gone."""
    return type(error).__name__ in PEER_LOST


def translate(error: Exception, action: str) -> TransportError:
    """The PushKV error for an exception that NIXL raised while it did ``action``."""
    name = type(error).__name__
    kind = PeerLost if is_peer_lost(error) else TransportError
    return kind(f"NIXL could not {action} ({name}: {error}): {MEANING.get(name, 'unforeseen')}.")
