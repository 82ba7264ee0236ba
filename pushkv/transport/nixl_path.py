"""What moves the bytes to a peer, and what a peer's death proves about its WRITEs."""

from __future__ import annotations

import os

from pushkv.transport.base import Proof


def proof_by_death(backend: str) -> Proof:
    """What the death of the peer's process proves about its WRITEs into our memory."""
    return Proof.NONE


def describe(backend: str, *, same_machine: bool) -> str:
    """The path in words."""
    chosen = os.environ.get("UCX_TLS", "all")
    return f"{backend}: UCX_TLS={chosen}" + (", same machine" if same_machine else "")
