"""The digest of what KV was computed from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pushkv.errors import ProtocolError

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
    is length-prefixed, so that no two different inputs run together into the same bytes. Raises ProtocolError for
    tokens that are no whole numbers of 64 bits in one row, and for what is no text.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"pushkv prompt")
    if isinstance(multimodal, (str, bytes)):
        raise ProtocolError(f"multimodal is {multimodal!r:.40}; give a list of hashes, be it of one.")
    for field in (_token_bytes(tokens), *(_text_bytes(text) for text in (salt, lora, *multimodal))):
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.digest()


def _token_bytes(tokens: Sequence[int] | NDArray[np.integer]) -> bytes:
    """As little-endian int64. What would have to be rounded or wrapped is refused: two prompts would become one."""
    try:
        ids = np.asarray(tokens)
    except ValueError as error:
        raise ProtocolError(f"Token ids {tokens!r:.40} are no row of numbers ({error}); give one.") from error
    if ids.ndim != 1 or (ids.size and (ids.dtype.kind not in "iu" or int(ids.max()) >= 1 << 63)):
        raise ProtocolError(
            f"Token ids {tokens!r:.40} have shape {ids.shape} and dtype {ids.dtype}; give one row of whole numbers "
            "below 2**63."
        )
    return ids.astype("<i8").tobytes()


def _text_bytes(text: str) -> bytes:
    if not isinstance(text, str):
        raise ProtocolError(f"A prompt's salt, lora or multimodal hash is {text!r:.40}; give text.")
    return text.encode("utf-8", "surrogatepass")
