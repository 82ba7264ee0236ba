"""The digest of what KV was computed from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 32


def prompt_digest(
    tokens: Sequence[int] | NDArray[np.integer],
    *,
    salt: str = "",
    lora: str = "",
    multimodal: Iterable[str] = (),
) -> bytes:
    """The 32-byte digest (BLAKE2b) of a whole prompt's token ids and of whatever else its KV depends on.

    ``salt`` is the engine's cache salt, ``lora`` the adapter's name, ``multimodal`` the hashes of the inputs behind
    placeholder tokens, in order. Both sides compute it alone; transfers with another digest are refused. Each field
    is length-prefixed, so that no two different inputs run together into the same bytes.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"pushkv prompt")
    ids = np.ascontiguousarray(tokens, dtype="<i8")
    for field in (ids.tobytes(), salt.encode(), lora.encode(), *(item.encode() for item in multimodal)):
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.digest()
