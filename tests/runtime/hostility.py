"""What tests of hostile peers have in common: a good pair beside them, and frames that are almost right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from pushkv import Outcome
from pushkv.core.messages import TOKEN_BYTES
from runtime.scene import WAIT, Pushed, Scene, array_of, cache_of, fill, memory_of

LIVE = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
TOKEN = b"t" * TOKEN_BYTES

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=40)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


class Good:
    """A producer and a consumer that are served whatever others do."""

    def __init__(self, scene: Scene, **more: Any) -> None:
        self.producer = scene.producer("good", cache_of(fill(memory_of())), **more)
        self.consumer = scene.consumer("good", **more)
        self.link = self.consumer.connect(self.producer.address)
        self.pushes = 0

    def push(self) -> None:
        """A push comes to a good end, and its bytes to the right place and nowhere else."""
        self.pushes += 1
        array_of(self.consumer)[:] = 0
        push = Pushed(self.producer, self.consumer, f"good {self.pushes}", [1, 2], [3, 4], 8)
        transfer = push.offer(self.link)
        stage = push.stage()
        assert transfer.wait(WAIT) is Outcome.COMPLETE, transfer.detail
        assert transfer.wait_released(WAIT)
        assert stage.wait_released(WAIT)
        assert push.arrived()
        assert not np.delete(array_of(self.consumer), [3, 4], axis=2).any()

    def unharmed(self) -> None:
        """No thread has stumbled."""
        self.push()
        for endpoint in (self.producer, self.consumer):
            assert endpoint.stats()["errors"] == 0
            assert endpoint._transfer.errors == 0
        assert self.link.alive


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to every place in nested lists and dictionaries."""
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The tree with another value in one place."""
    if not path:
        return value
    copy = tree.copy()
    copy[path[0]] = replaced(tree[path[0]], path[1:], value)
    return copy


@st.composite
def spoiled(draw: st.DrawFn, frames: list[bytes]) -> bytes:
    """A good frame cut short, lengthened, with bytes changed, or with something else in some place of it."""
    frame = draw(st.sampled_from(frames))
    way = draw(st.sampled_from(["cut", "longer", "bytes", "places", "places"]))
    if way == "cut":
        return frame[: draw(st.integers(0, len(frame)))]
    if way == "longer":
        return frame + draw(st.binary(min_size=1, max_size=40))
    if way == "bytes":
        changed = bytearray(frame)
        for _ in range(draw(st.integers(1, 4))):
            changed[draw(st.integers(0, len(frame) - 1))] = draw(st.integers(0, 255))
        return bytes(changed)
    tree = msgspec.msgpack.decode(frame)
    for _ in range(draw(st.integers(1, 3))):
        tree = replaced(tree, draw(st.sampled_from(list(places(tree)))), draw(anything | st.just(tree)))
    return msgspec.msgpack.encode(tree)
