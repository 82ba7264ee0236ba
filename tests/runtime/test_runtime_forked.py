"""A forked child has an endpoint's object and none of its threads: every call says so, and nothing is touched."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pushkv import Consumer, Link, Outcome, Producer
from pushkv.errors import ForkedProcess, PushKVError
from runtime.scene import WAIT, Pushed, Scene, cache_of, fill, memory_of


@pytest.fixture
def ends(scene: Scene) -> tuple[Producer, Consumer, Link]:
    producer = scene.producer(cache=cache_of(fill(memory_of())))
    consumer = scene.consumer()
    return producer, consumer, consumer.connect(producer.address)


def in_a_child(work: Callable[[], Any]) -> Any:
    """What this returns in a forked child, which has WAIT seconds and is gone afterwards."""
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking where there are threads, which is the point
        child = os.fork()
    if not child:
        try:
            os.write(theirs, json.dumps(work()).encode())
        except BaseException as error:
            os.write(theirs, json.dumps(f"{type(error).__name__}: {error}").encode())
        finally:
            os._exit(0)
    os.close(theirs)
    try:
        assert select.select([ours], [], [], WAIT)[0], "the child hangs"
        return json.loads(os.read(ours, 1 << 16))
    finally:
        os.close(ours)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def raised(call: Callable[[], object]) -> str:
    try:
        return f"no error, but {call()!r}"
    except PushKVError as error:
        return f"{type(error).__name__}: {error}"


def public(thing: object) -> list[str]:
    """Its public methods and properties."""
    return [name for name in dir(type(thing)) if not name.startswith("_") and name != "role"]


def use(thing: object, name: str) -> object:
    """Read it, and call it if it can be called."""
    value = getattr(thing, name)
    return value() if callable(value) else value


def push(producer: Producer, consumer: Consumer, link: Link, name: str) -> None:
    one = Pushed(producer, consumer, name, [1, 2, 3], [4, 5, 6], 10)
    transfer = one.offer(link)
    one.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert transfer.wait_released(WAIT)


def test_every_public_call_raises_in_a_child(ends: tuple[Producer, Consumer, Link]) -> None:
    producer, consumer, link = ends
    one = Pushed(producer, consumer, "open", [10], [11], 4)
    transfer, stage = one.offer(link), one.stage(ready=0)
    things: dict[str, object] = {
        "Producer": producer, "Consumer": consumer, "Link": link, "Transfer": transfer, "Ending": stage
    }  # fmt: skip
    told = in_a_child(
        lambda: {
            f"{kind}.{name}": raised(lambda thing=thing, name=name: use(thing, name))
            for kind, thing in things.items()
            for name in public(thing)
        }
    )
    assert {"Producer.stage", "Consumer.offer", "Consumer.connect", "Producer.close", "Link.alive"} <= set(told)
    assert {"Consumer.held_blocks", "Transfer.wait", "Ending.wait_released", "Producer.events"} <= set(told)
    assert not {name: word for name, word in told.items() if not word.startswith("ForkedProcess: ")}
    assert f"and process {os.getpid()} made it: a forked child has none" in told["Producer.stage"]
    assert told["Producer.stage"].startswith("ForkedProcess: Producer.stage is called in process ")
    one.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE, "the parent goes on"


def test_a_child_cannot_close_what_is_its_parents(ends: tuple[Producer, Consumer, Link]) -> None:
    """Also not by leaving a block, which does nothing there: the child may have an error of its own to tell."""
    producer, consumer, link = ends

    def leave() -> list[str]:
        told = [raised(producer.close), raised(consumer.close)]
        with producer, consumer:
            pass
        try:
            with producer:
                raise ValueError("the child's own")
        except ValueError as error:
            told.append(str(error))
        return told

    told = in_a_child(leave)
    assert [word.partition(":")[0] for word in told] == ["ForkedProcess", "ForkedProcess", "the child's own"]
    push(producer, consumer, link, "after")
    assert producer.close(WAIT)
    assert consumer.close(WAIT)


def test_a_child_that_was_forked_while_a_lock_was_held_does_not_wait_for_it(
    ends: tuple[Producer, Consumer, Link],
) -> None:
    producer, _, _ = ends
    with producer._renewal, producer._close_once:
        told = in_a_child(lambda: [raised(producer.close), raised(producer.fence), raised(producer.sleep)])
    assert {word.partition(":")[0] for word in told} == {"ForkedProcess"}


def test_a_child_may_make_endpoints_of_its_own(ends: tuple[Producer, Consumer, Link]) -> None:
    producer, consumer, link = ends

    def push_in_the_child() -> str:
        from pushkv.transport.memory import Network

        scene = Scene(Network(immediate=True))
        ours, theirs = scene.producer("child", cache=cache_of(fill(memory_of()))), scene.consumer("child")
        push(ours, theirs, theirs.connect(ours.address), "r")
        scene.close()
        return "pushed"

    assert in_a_child(push_in_the_child) == "pushed"
    push(producer, consumer, link, "after")


def test_in_its_own_process_nothing_is_guarded() -> None:
    assert issubclass(ForkedProcess, PushKVError)
    assert Producer.stage.__name__ == "stage"
    assert Producer.stage.__doc__
    assert "prompt_tokens" in Consumer.offer.__annotations__
    assert Consumer.held_blocks.__doc__  # type: ignore[attr-defined]


SCRIPT = """
import os, sys
import numpy as np
from pushkv import Consumer, EndpointConfig, KVCache, Producer
from pushkv.errors import ForkedProcess

array = np.arange(64 * 1024, dtype=np.uint8).reshape(1, 64, 4, 256)
cache, target = KVCache.of(array, "LBNC"), KVCache.of(np.zeros_like(array), "LBNC")
producer = Producer(EndpointConfig(engine="p"), cache)
consumer = Consumer(EndpointConfig(engine="d"), target)
link = consumer.connect(producer.address)
asked = {"prompt": bytes(32), "prompt_tokens": 16}
child = os.fork()
if not child:
    for call in (lambda: consumer.offer("c", link, [0, 1, 2, 3], **asked), producer.close, lambda: link.alive):
        try:
            print("no error, but", call())
        except ForkedProcess as error:
            print("child:", error)
    sys.exit(7)  # as an interpreter ends: what it holds is taken apart
_, status = os.waitpid(child, 0)
transfer = consumer.offer("r", link, [0, 1, 2, 3], **asked)
producer.stage("r", [4, 5, 6, 7], **asked)
print("parent:", os.waitstatus_to_exitcode(status), transfer.wait(60).value)
print("closed:", consumer.close(), producer.close())
"""


@pytest.mark.processes
@pytest.mark.parametrize("tls", ["", "tcp"], ids=["default", "tcp"])
def test_over_nixl_a_child_ends_as_it_likes_and_the_parent_goes_on(tls: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    environment |= {"UCX_TLS": tls} if tls else {}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, cwd=Path.cwd())
    lines = done.stdout.splitlines()
    assert [line for line in lines if not line.startswith("child:")] == ["parent: 7 complete", "closed: True True"], (
        done.stdout + done.stderr
    )
    assert len(lines) == 5
    assert all("a forked child has none of its threads" in line for line in lines[:3])
