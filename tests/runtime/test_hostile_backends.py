"""Backends that raise, leave or answer with something else: what they were asked for fails, and nothing more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from pushkv import Consumer, KVCache, Outcome, Producer, prompt_digest
from pushkv.backends.base import PassedFence
from pushkv.backends.cpu import CpuBackend
from pushkv.errors import BackendError
from runtime.scene import WAIT, Scene, cache_of, fill, memory_of

ASKED = {"prompt": prompt_digest(range(10)), "prompt_tokens": 10}
LANDING = {"landing": "landing", "landing_bytes": 1 << 16, "slot_bytes": 1 << 13}


def raises(*_: object, **__: object) -> Any:
    raise ValueError("oh dear")


def leaves(*_: object, **__: object) -> Any:
    raise SystemExit(3)


def gives(value: object) -> Callable[..., Any]:
    return lambda *_, **__: value


YES, DONE = gives(True), gives(PassedFence())


@dataclass
class Says:
    """A fence, or a packer, that does what it is told to."""

    done: Callable[[], Any] = YES
    gather: Callable[..., Any] = DONE
    scatter: Callable[..., Any] = DONE

    def wait(self) -> None:
        """Nothing."""


class Odd(CpuBackend):
    """The host's memory, with some of its methods replaced."""

    def __init__(self, **methods: Any) -> None:
        super().__init__()
        vars(self).update(methods)


def odd(**methods: Any) -> KVCache:
    return replace(cache_of(fill(memory_of())), backend=Odd(**methods))


@pytest.mark.parametrize(("how", "told"), [(raises, "ValueError: oh dear"), (leaves, "SystemExit: 3")])
class TestAtTheStart:
    @pytest.mark.parametrize("role", ["producer", "consumer"])
    def test_a_thread_that_cannot_be_made_ready(self, scene: Scene, role: str, how: Any, told: str) -> None:
        with pytest.raises(BackendError, match=f"'cpu' cannot make a thread ready, {told}; report it to its author"):
            getattr(scene, role)(cache=odd(prepare_thread=how))

    @pytest.mark.parametrize(("method", "what"), [("allocate", "allocate slots"), ("packer", "make a packer")])
    def test_slots_that_cannot_be_made(self, scene: Scene, method: str, what: str, how: Any, told: str) -> None:
        with pytest.raises(BackendError, match=f"'cpu' cannot {what}, {told}"):
            scene.producer(cache=odd(**{method: how}), **LANDING)
        # By choice they are done without.
        direct = scene.producer(cache=odd(**{method: how}), **{**LANDING, "landing": "auto"})
        assert pushed(scene, direct, scene.consumer()) == (Outcome.COMPLETE, "")

    def test_a_fence_that_cannot_be_made(self, scene: Scene, how: Any, told: str) -> None:
        producer = scene.producer(cache=odd(fence=how))
        with pytest.raises(BackendError, match=f"'cpu' cannot make a fence, {told}"):
            producer.stage("r", [1, 2, 3], **ASKED)
        scene.producer()  # and nobody is the worse for it

    def test_an_array_that_cannot_be_described(self, how: Any, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(CpuBackend, "describe", how)
        with pytest.raises(BackendError, match=f"'cpu' failed to describe an array, {told}"):
            cache_of(np.zeros((1, 2, 3, 2, 4, 4), np.float32))


def pushed(scene: Scene, producer: Producer, consumer: Consumer) -> tuple[Outcome | None, str]:
    link = consumer.connect(producer.address)
    transfer = consumer.offer("r", link, [4, 5, 6], **ASKED)
    stage = producer.stage("r", [1, 2, 3], **ASKED)
    assert transfer.wait(WAIT) is not None
    assert transfer.wait_released(WAIT)
    assert stage.wait_released(WAIT)
    return transfer.outcome, transfer.detail


@pytest.mark.parametrize(
    ("fence", "told"),
    [
        (None, "'NoneType' object has no attribute 'done'"),
        (Says(done=raises), "oh dear"),
        (Says(done=leaves), "3"),
        (Says(done=gives("no")), r"Says.done() returned 'no', which is neither True nor False"),
        (Says(done=gives(None)), "returned None"),
    ],
)
def test_a_fence_that_says_no_such_thing(scene: Scene, fence: object, told: str) -> None:
    """Least of all is it taken for passed."""
    producer = scene.producer(cache=odd(fence=gives(fence)))
    outcome, detail = pushed(scene, producer, scene.consumer())
    assert outcome is Outcome.TRANSPORT_ERROR
    assert f"its fence failed: {told}" in detail or (told in detail and "its fence failed" in detail)


@pytest.mark.parametrize("side", ["producer", "consumer"])
@pytest.mark.parametrize(
    ("packer", "told"),
    [
        (None, "has no attribute"),
        (Says(gather=raises, scatter=raises), "oh dear"),
        (Says(gather=leaves, scatter=leaves), "3"),
        (Says(gather=gives(None), scatter=gives(None)), "'NoneType' object has no attribute 'done'"),
        (Says(gather=gives(Says(done=gives(1))), scatter=gives(Says(done=gives(1)))), "neither True nor False"),
    ],
)
def test_a_copy_that_goes_wrong_is_the_end_of_its_transfer(
    scene: Scene, side: str, packer: object, told: str
) -> None:
    """And of nothing else: the copy thread goes on, and closing waits for nothing."""
    made = {"producer": scene.producer, "consumer": scene.consumer}
    caches = {"producer": cache_of(fill(memory_of())), "consumer": cache_of(memory_of())}
    caches[side] = odd(packer=gives(packer))
    producer, consumer = (made[role](cache=caches[role], **LANDING) for role in ("producer", "consumer"))
    outcome, detail = pushed(scene, producer, consumer)
    assert outcome is Outcome.TRANSPORT_ERROR
    assert ("could not be gathered" if side == "producer" else "could not be scattered") in detail
    assert told in detail
    assert all(one.close(WAIT) for one in (consumer, producer))
    scene.endpoints.clear()
