"""A trial: one real push between two processes of this machine, from memory of one backend to memory of the same.

``python -m pushkv.doctor.trial BACKEND MOVER`` makes it and prints what came of it. It runs apart from the
examination: a data mover that hangs or crashes takes its process with it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import sys
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from pushkv import Consumer, EndpointConfig, KVCache, Outcome, Producer, prompt_digest
from pushkv.backends.base import is_tensor
from pushkv.config import NixlConfig
from pushkv.errors import PushKVError
from pushkv.plugins import get_backend

MARK = "pushkv doctor trial: "
SHAPE = (2, 2, 16, 4, 16, 64)
"""Layers, K and V, blocks, heads, tokens, bytes: 256 KiB."""
BLOCKS = [3, 1, 8, 9, 14]
TOKENS = 16 * len(BLOCKS) - 5
WAIT_S = 40.0


def main(argv: list[str]) -> int:
    """Make the push and print ``{"ok": …, "error": …}``."""
    parser = argparse.ArgumentParser(prog="python -m pushkv.doctor.trial")
    parser.add_argument("backend")
    parser.add_argument("mover")
    args = parser.parse_args(argv)
    mp.set_start_method("spawn")
    error = _push(args.backend, args.mover)
    print(MARK + json.dumps({"ok": not error, "error": error}), flush=True)
    return 1 if error else 0


def _push(backend: str, mover: str) -> str:
    """What went wrong, empty if nothing did."""
    ours, theirs = mp.Pipe()
    other = mp.Process(target=_decode, args=(backend, mover, theirs), name="decode", daemon=True)
    other.start()
    theirs.close()
    try:
        return _prefill(backend, mover, ours)
    except PushKVError as error:
        return str(error)
    except (EOFError, OSError) as error:
        return f"the decode process ended early ({type(error).__name__}, exit code {other.exitcode})"
    finally:
        ours.close()
        other.join(10)
        if other.is_alive():
            other.kill()


def _prefill(backend: str, mover: str, pipe: Connection) -> str:
    cache, array = _cache(backend)
    with Producer(_config("prefill", mover), cache) as producer:
        pipe.send(producer.address)
        _fill(array, _pattern())
        stage = producer.stage("trial", BLOCKS, prompt=_digest(), prompt_tokens=TOKENS)
        error: str = pipe.recv()
        stage.wait_released(WAIT_S)
    return error


def _decode(backend: str, mover: str, pipe: Connection) -> None:
    try:
        pipe.send(_receive(backend, mover, pipe.recv()))
    except PushKVError as error:
        pipe.send(str(error))


def _receive(backend: str, mover: str, address: str) -> str:
    cache, array = _cache(backend)
    with Consumer(_config("decode", mover), cache) as consumer:
        link = consumer.connect(address)
        transfer = consumer.offer("trial", link, BLOCKS, prompt=_digest(), prompt_tokens=TOKENS)
        outcome = transfer.wait(WAIT_S)
        if outcome is not Outcome.COMPLETE:
            return f"the push ended as {outcome.value if outcome else 'nothing yet'}: {transfer.detail}"
        return "" if _arrived(array) else "the push was complete and other bytes than those that were sent arrived"


def _config(engine: str, mover: str) -> EndpointConfig:
    return EndpointConfig(engine=f"doctor-{engine}", nixl=NixlConfig(backend=mover))  # type: ignore[arg-type]


def _digest() -> bytes:
    return prompt_digest([1, 2, 3])


def _cache(backend: str) -> tuple[KVCache, Any]:
    """A cache in the backend's memory, zeroed. Raises BackendError."""
    array = get_backend(backend).allocate(int(np.prod(SHAPE))).reshape(SHAPE)
    return KVCache.of(array, "LSBHNC", model="trial"), array


def _pattern() -> Any:
    return np.random.default_rng(11).integers(1, 256, SHAPE, np.uint8)


def _fill(array: Any, values: Any) -> None:
    if not is_tensor(array):
        array[:] = values
        return
    import torch

    array.copy_(torch.from_numpy(values))


def _arrived(array: Any) -> bool:
    """Whether the tokens of the prompt are those that were sent, in every block."""
    found = array.cpu().numpy() if is_tensor(array) else array
    wanted = _pattern()
    last = TOKENS % 16
    full = np.array_equal(found[:, :, BLOCKS[:-1]], wanted[:, :, BLOCKS[:-1]])
    return full and np.array_equal(found[:, :, BLOCKS[-1], :, :last], wanted[:, :, BLOCKS[-1], :, :last])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
