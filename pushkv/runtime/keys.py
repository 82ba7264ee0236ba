"""Cluster keys: who may talk to an endpoint's control port, over ZeroMQ CURVE.

Everybody of a cluster holds the same key. From it each side derives two CURVE key pairs, one to listen with and one
to dial with: who does not have the key can neither prove itself to a producer nor read or forge what is said. While a
key is being rotated two are valid: a producer listens with its first and accepts dialling with any; a consumer
dials with its first and goes on to the next where that finds no hearing.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from pushkv.errors import ConfigError

PREFIX = "pushkv1-"
KEY_BYTES = 32
VARIABLE = "PUSHKV_CLUSTER_KEY"


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair in Z85, as ZeroMQ takes it."""

    public: bytes
    secret: bytes


@dataclass(frozen=True, repr=False)
class ClusterKey:
    """One cluster key. It is never printed."""

    raw: bytes

    def __repr__(self) -> str:
        return f"ClusterKey({self.fingerprint})"

    @property
    def fingerprint(self) -> str:
        """Eight digits to tell keys apart in logs; they say nothing about the key."""
        return hashlib.blake2b(self.raw, digest_size=4, person=b"pushkv print").hexdigest()

    def pair(self, role: str) -> KeyPair:
        """The key pair of the listening (``"listen"``) or the dialling (``"dial"``) side."""
        secret = hashlib.blake2b(self.raw, digest_size=32, person=f"pushkv {role}".encode()).digest()
        encoded = z85.encode(secret)
        return KeyPair(zmq.curve_public(encoded), encoded)


def new_key() -> str:
    """A fresh cluster key as text."""
    return PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(KEY_BYTES)).decode().rstrip("=")


def parse_key(text: str) -> ClusterKey:
    """The key in a line of text. Raises ConfigError, without showing the text."""
    plain = text.strip()
    body = plain.removeprefix(PREFIX)
    try:
        raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except ValueError:
        raw = b""
    if not plain.startswith(PREFIX) or len(raw) != KEY_BYTES:
        raise ConfigError(f"a cluster key of {len(plain)} characters is none of ours; make one with `pushkv keygen`.")
    return ClusterKey(raw)


def load_keys(file: str = "", environment: Mapping[str, str] = os.environ) -> tuple[ClusterKey, ...]:
    """The valid keys, the first one first: from a file (one a line, # comments) or the environment (by commas).

    Nothing given means no keys. Raises ConfigError for a file that others can read, that is missing, or holds none.
    """
    if file:
        return _at_most_two(_lines_of(Path(file)), file)
    return _at_most_two((part for part in environment.get(VARIABLE, "").split(",") if part.strip()), VARIABLE)


def _lines_of(path: Path) -> list[str]:
    try:
        mode = path.stat().st_mode
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(
            f"cluster key file {path} cannot be read: {error.strerror}; see `pushkv keygen`."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cluster key file {path} is no text; make one with `pushkv keygen`.") from error
    except ValueError as error:  # a NUL in the name
        raise ConfigError(f"cluster key file {str(path)!r:.80} is no file's name: {error}.") from error
    if mode & 0o077:
        raise ConfigError(f"cluster key file {path} can be read by others (mode {mode & 0o777:o}); chmod 600 it.")
    keys = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(f"cluster key file {path} holds no key; make one with `pushkv keygen`.")
    return keys


def _at_most_two(texts: Iterable[str], where: str) -> tuple[ClusterKey, ...]:
    keys = []
    for number, text in enumerate(texts, 1):
        try:
            keys.append(parse_key(text))
        except ConfigError as error:
            raise ConfigError(f"{where}, key {number}: {error}") from error
    if len(keys) > 2:
        raise ConfigError(f"{where} holds {len(keys)} cluster keys; at most two are valid while one is rotated out.")
    return tuple(keys)
