"""Factors: equal on all ranks of an engine, and named where two engines differ."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from pushkv.core.compat import Factors, compatibility, differences
from pushkv.core.geometry import CacheGroup, Geometry, Kind, Layer, Place, Strides

GROUP = CacheGroup(
    (Layer("layer.0", (Place(0, 0), Place(1, 0))),), 9, 16, 8, 0, 8, 128, 2, "bfloat16", Strides(1, 1, 1, 1)
)


def test_sharding_and_layout_do_not_count() -> None:
    moved = msgspec.structs.replace(
        GROUP, layers=(), blocks=5, block_size=32, head_start=4, head_stop=5, replica=1, replicas=2,
        strides=Strides(9, 9, 9, 9),
    )  # fmt: skip
    ours, theirs = compatibility(Geometry((GROUP,)), model="m"), compatibility(Geometry((moved,)), model="m")
    assert ours == theirs
    assert ours.digest == theirs.digest
    assert differences(ours, theirs) == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"kind": Kind.LATENT}, "group 0 kind: 'attention' against 'latent'"),
        ({"dtype": "float8_e4m3fn"}, "group 0 dtype: 'bfloat16' against 'float8_e4m3fn'"),
        ({"itemsize": 1}, "group 0 element bytes: '2' against '1'"),
        ({"content": 64}, "group 0 content elements: '128' against '64'"),
        ({"sides": 1}, "group 0 sides: '2' against '1'"),
        ({"total_heads": 4}, "group 0 heads of the model: '8' against '4'"),
        ({"window": 4096}, "group 0 window: '0' against '4096'"),
    ],
)
def test_each_factor_is_named_with_both_values(change: dict[str, object], line: str) -> None:
    ours = compatibility(Geometry((GROUP,)))
    theirs = compatibility(Geometry((msgspec.structs.replace(GROUP, **change),)))
    assert differences(ours, theirs) == [line]
    assert ours.digest != theirs.digest


def test_blocks_that_are_copied_whole_have_to_be_of_one_size() -> None:
    def factors(**change: object) -> Factors:
        return compatibility(Geometry((msgspec.structs.replace(GROUP, **change),)))

    ours = factors(whole_blocks=True)
    assert differences(ours, factors(whole_blocks=True, blocks=5)) == []
    line = "group 0 tokens of whole blocks: '16' against '32'"
    assert differences(ours, factors(whole_blocks=True, block_size=32)) == [line]
    assert differences(ours, factors()) == ["group 0 tokens of whole blocks: '16' against 'not given'"]


def test_all_differences_are_listed_at_once() -> None:
    ours = compatibility(Geometry((GROUP,)), model="llama", revision=3, packed=None)
    theirs = compatibility(Geometry((GROUP, GROUP)), model="qwen", revision=4)
    lines = differences(ours, theirs)
    assert "cache groups: '1' against '2'" in lines
    assert "model: 'llama' against 'qwen'" in lines
    assert "revision: '3' against '4'" in lines
    assert "packed: 'null' against 'not given'" in lines
    assert sum(line.startswith("group 1 ") for line in lines) == 7
    assert differences(theirs, ours)[0] == "cache groups: '2' against '1'"


def test_the_digest_does_not_depend_on_process_or_order() -> None:
    digest = compatibility(Geometry((GROUP,)), b="é", a=1.5, c=True).digest
    assert digest == compatibility(Geometry((GROUP,)), c=True, a=1.5, b="é").digest
    assert len(digest) == 64
    assert int(digest, 16) > 0
    code = (
        "from pushkv.core.compat import Factors;"
        "print(Factors((('dtype', 'bfloat16'), ('model', 'm'))).digest, end='')"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert seen == Factors((("dtype", "bfloat16"), ("model", "m"))).digest
    # Written down, because two versions must agree on it.
    assert seen == "9aad1e364483353adbff63b6cdd3c22d71a6584f512c8d4767ef520114c22aa7"


def test_factors_travel_in_msgpack() -> None:
    factors = compatibility(Geometry((GROUP,)), model="m")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(factors), type=Factors) == factors
