"""Describing a rank's cache, and what cannot be described."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pushkv import EndpointConfig, KVCache
from pushkv.backends.cpu import CpuBackend
from pushkv.core.geometry import Kind
from pushkv.core.layouts import Packing, Shard
from pushkv.core.memory import Region
from pushkv.errors import BackendError, GeometryError, UnclaimedDevice
from pushkv.runtime.slots import slots_of


def array(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def test_one_array_of_all_layers() -> None:
    kv = array(3, 2, 8, 2, 4, 16)
    cache = KVCache.of(kv, "LSBHNC", model="m", revision=None)
    (group,) = cache.geometry.groups
    assert [layer.name for layer in group.layers] == ["layer.0", "layer.1", "layer.2"]
    assert (group.blocks, group.block_size, group.head_start, group.head_stop, group.total_heads) == (8, 4, 0, 2, 2)
    assert cache.regions == (Region(kv.ctypes.data, kv.nbytes),)
    assert cache.home == ("DRAM", 0)
    assert cache.arrays == (kv,)
    assert dict(cache.factors.items)["model"] == "m"
    assert dict(cache.factors.items)["revision"] == "null"
    assert cache.backend.name == "cpu"


def test_one_array_a_layer() -> None:
    layers = {f"model.layers.{n}": array(2, 8, 4, 2, 16) for n in range(3)}
    cache = KVCache.of(layers, "SBNHC")
    assert [layer.name for layer in cache.geometry.groups[0].layers] == list(layers)
    assert len(cache.regions) == 3


def test_layers_named_and_heads_of_the_model() -> None:
    cache = KVCache.of(
        array(2, 8, 4, 2, 16), "LBNHC", layers=("a", "b"), shard=Shard(2, 4, 8), packing=Packing.CONTENT
    )
    (group,) = cache.geometry.groups
    assert [layer.name for layer in group.layers] == ["a", "b"]
    assert (group.head_start, group.head_stop, group.total_heads) == (2, 4, 8)


def test_a_latent_cache_without_heads() -> None:
    cache = KVCache.of(array(2, 8, 4, 64), "LBNC", kind=Kind.LATENT)
    (group,) = cache.geometry.groups
    assert (group.kind, group.total_heads) == (Kind.LATENT, 1)


def test_no_array() -> None:
    with pytest.raises(GeometryError, match="There is no array to describe; give at least one"):
        KVCache.of({}, "SBNHC")


@pytest.mark.parametrize("axes", ["LSBHN", "LSBHNX", "LLBHNC"])
def test_axes_that_do_not_fit(axes: str) -> None:
    with pytest.raises(GeometryError):
        KVCache.of(array(3, 2, 8, 2, 4, 16), axes)


def test_an_array_on_a_device_nobody_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pushkv.plugins.device_type_of", lambda array: "npu")
    with pytest.raises(UnclaimedDevice, match=r"known: cpu, cuda, neuron\); install .* claims 'npu'"):
        KVCache.of(array(2, 8, 4, 64), "LBNC")


def test_something_that_is_no_array() -> None:
    with pytest.raises(BackendError, match="a list cannot be described; pass a numpy array or a torch tensor"):
        KVCache.of([1, 2], "LB")


@pytest.mark.parametrize(
    ("answer", "phrase"),
    [
        (None, "describes an array as None, which is no ArrayDescription"),
        ((1, 2), r"describes an array as \(1, 2\)"),
        (
            ZeroDivisionError("a bug"),
            "failed to describe an array, ZeroDivisionError: a bug; report",
        ),
    ],
)
def test_a_backend_that_does_not_describe(answer: Any, phrase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(self: CpuBackend, array: object) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(CpuBackend, "describe", describe)
    with pytest.raises(BackendError, match=phrase):
        KVCache.of(array(2, 4, 4, 8), "LBNC", model="m")


def test_a_backend_that_gives_too_little_memory_for_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots behind its end would be somebody else's memory."""
    monkeypatch.setattr(CpuBackend, "allocate", lambda self, size, device=0: np.zeros(size - 1, np.uint8))
    cache = KVCache.of(array(2, 4, 4, 8), "LBNC", model="m")
    config = EndpointConfig(engine="p", landing="landing", landing_bytes=1 << 14, slot_bytes=1 << 12)
    with pytest.raises(BackendError, match="was asked for 16384 bytes and gave an array of shape"):
        slots_of(config, cache)


def test_two_devices() -> None:
    cache = KVCache.of(array(2, 8, 4, 64), "LBNC")
    regions = (cache.regions[0], Region(1 << 30, 64, 1, "VRAM"))
    with pytest.raises(GeometryError, match="an endpoint serves one device: split it"):
        KVCache(cache.geometry, regions, cache.factors, cache.backend)


def test_a_geometry_beyond_its_regions() -> None:
    cache = KVCache.of(array(2, 8, 4, 64), "LBNC")
    with pytest.raises(GeometryError, match="which has 64 bytes"):
        KVCache(cache.geometry, (Region(cache.regions[0].address, 64),), cache.factors, cache.backend)


@pytest.mark.parametrize(
    ("axes", "settings", "message"),
    [
        ("LBHNC", {"packing": "content"}, "packing is 'content'; give a member of Packing"),
        ("LBHNC", {"kind": "attention"}, "kind is 'attention'; give a member of Kind"),
        ("LSBNC", {"packing": Packing.CONTENT}, "S axis tells K and V apart, and so would packing 'content'"),
        ("LBHNC", {"layers": "ab"}, "layers is 'ab'; give a list of names"),
        ("LBHNC", {"layers": (1, 2)}, r"cannot travel \(Expected `str`, got `int`"),
        ("LBHNC", {"shard": Shard(0, 8 / 4, 8)}, r"cannot travel \(Expected `int`, got `float`"),
        ("LBHNC", {"heads": 0}, r"this rank's share is \[0, 0\)"),
        ("LBHNC", {"model": object()}, "The factor 'model' is <object"),
        ("LBHNC", {"model": b"m"}, "The factor 'model' is b'm'"),
        ("LBHNC", {"cache groups": "7"}, "under a name of its own"),
    ],
)
def test_settings_that_would_be_taken_for_something_else(axes: str, settings: Any, message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        KVCache.of(array(2, 2, 2, 4, 8), axes, **settings)


def test_arrays_of_one_layer_have_no_layer_axis() -> None:
    """All but the first layer of each would be left behind."""
    with pytest.raises(GeometryError, match="'LSBHNC' name an L axis of arrays that are one a layer"):
        KVCache.of({"a": array(2, 2, 4, 2, 4, 8)}, "LSBHNC")
    with pytest.raises(GeometryError, match="none with a mapping"):
        KVCache.of({"a": array(2, 4, 2, 4, 8)}, "SBHNC", layers=("b",))


@pytest.mark.parametrize("shape", [(0, 2, 4, 8), (2, 0, 4, 8)])
def test_arrays_that_hold_nothing(shape: tuple[int, ...]) -> None:
    with pytest.raises(GeometryError, match="holds nothing; give each axis a size of 1 or more"):
        KVCache.of(array(*shape), "LBNC")
