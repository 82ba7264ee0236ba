"""Digests of prompts: equal for equal inputs, different for any difference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushkv import prompt_digest
from pushkv.core.prompt import DIGEST_BYTES
from pushkv.errors import ProtocolError

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=8)
WORDS = st.text(max_size=4)
INPUTS = st.tuples(IDS, WORDS, WORDS, st.lists(WORDS, max_size=3))


def digest(inputs: tuple[list[int], str, str, list[str]]) -> bytes:
    ids, salt, lora, multimodal = inputs
    return prompt_digest(ids, salt=salt, lora=lora, multimodal=multimodal)


@given(INPUTS, INPUTS)
def test_equal_exactly_for_equal_inputs(one: tuple[list[int], str, str, list[str]], other: tuple) -> None:  # type: ignore[type-arg]
    assert (digest(one) == digest(other)) == (one == other)


@given(IDS)
def test_the_kind_of_sequence_does_not_matter(ids: list[int]) -> None:
    expected = prompt_digest(ids)
    assert len(expected) == DIGEST_BYTES
    for form in (
        tuple(ids),
        np.array(ids, np.int32),
        np.array(ids, np.int64),
        np.array(ids * 2, np.int64)[: len(ids)],
    ):
        assert prompt_digest(form) == expected
    strided = np.array([ids, ids], np.int64).T[:, 0] if ids else np.array(ids, np.int64)
    assert prompt_digest(strided) == expected


def test_it_does_not_change_between_versions() -> None:
    """Both sides may run different versions of this code."""
    plain = prompt_digest([1, 2, 3], salt="s", lora="l", multimodal=["m", "n"])
    assert plain.hex() == "91c37460ba96491527c8184d6413d0c13730bda6eaf9943124c032a5bc2ea504"


@pytest.mark.parametrize(
    "tokens",
    [
        [1.5, 2.0],
        np.array([1.0, 2.0]),
        np.array([1 << 63], np.uint64),
        [1 << 70],
        "123",
        None,
        [[1, 2], [3, 4]],
        [[1], [2, 3]],
        5,
        [True, False],
        iter([1, 2]),
    ],
)
def test_tokens_that_would_be_rounded_into_those_of_another_prompt(tokens: Any) -> None:
    with pytest.raises(ProtocolError, match="Token ids"):
        prompt_digest(tokens)


@pytest.mark.parametrize("wrong", [{"salt": None}, {"lora": b"l"}, {"multimodal": [b"m"]}, {"multimodal": "hash"}])
def test_texts_that_are_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=r"is (None|b'l'|b'm'|'hash')"):
        prompt_digest([1], **wrong)
