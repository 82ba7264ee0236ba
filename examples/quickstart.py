"""PushKV in an engine of your own: one process pushes a prompt's KV into the blocks of another, over NIXL.

``pip install pushkv && pip install --no-deps nixl-cu12``, then ``python examples/quickstart.py``.
"""

import multiprocessing as mp

import numpy as np

from pushkv import Consumer, EndpointConfig, KVCache, Outcome, Producer, prompt_digest

PROMPT = list(range(1000, 1100))  # 100 token ids fill seven blocks of 16, the last one partly
DIGEST = prompt_digest(PROMPT)  # both sides compute it; KV of another prompt, adapter or salt is refused


def make_cache() -> tuple[np.ndarray, KVCache]:
    """Your engine's paged cache (here: 4 layers, K and V, 64 blocks, 2 heads, 16 tokens, 32 floats), described."""
    array = np.zeros((4, 2, 64, 2, 16, 32), np.float32)
    # One letter a dimension; `model` and any other keyword must be equal on both sides, or they do not connect.
    return array, KVCache.of(array, "LSBHNC", model="my model")


def prefill(pipe) -> None:
    array, cache = make_cache()
    blocks = [9, 8, 7, 12, 30, 31, 2]  # from your allocator; any blocks in any order
    with Producer(EndpointConfig(engine="prefill"), cache) as producer:
        pipe.send(producer.address)  # in earnest your service discovery tells decode engines
        pipe.recv()  # here decode offers first; the other way round works as well
        for start, stop in (0, 64), (64, 100):  # prefill in chunks: each is sent while the next is computed
            for token in range(start, stop):
                array[:, :, blocks[token // 16], :, token % 16] = PROMPT[token]  # "computing" KV
            stage = producer.stage("request 1", blocks, prompt=DIGEST, prompt_tokens=len(PROMPT), ready=stop)
        stage.wait_released(30)  # only now may the blocks be freed or overwritten
        print(f"prefill: {stage.outcome}, {producer.stats()['bytes']} bytes sent", flush=True)


def decode(pipe) -> None:
    array, cache = make_cache()
    blocks = [40, 41, 42, 43, 50, 3, 4]
    with Consumer(EndpointConfig(engine="decode"), cache) as consumer:
        link = consumer.connect(pipe.recv())  # once a prefill engine, ahead of requests; a list of ranks for TP
        transfer = consumer.offer("request 1", link, blocks, prompt=DIGEST, prompt_tokens=len(PROMPT))
        pipe.send("offered")
        # An engine does not wait: it polls consumer.events() between two steps. Every transfer ends by its deadline.
        assert transfer.wait(30) is Outcome.COMPLETE, transfer.detail
        for token, value in enumerate(PROMPT):
            assert (array[:, :, blocks[token // 16], :, token % 16] == value).all()
        print(f"decode: {transfer.outcome}, every byte right, by {consumer.path(link.agents[0])}", flush=True)
        transfer.wait_released(30)  # only now may the blocks be used for anything else


if __name__ == "__main__":
    mp.set_start_method("spawn")  # NIXL has threads of its own, which do not survive a fork
    ends = mp.Pipe()
    sides = [mp.Process(target=side, args=(end,)) for side, end in zip((prefill, decode), ends, strict=True)]
    [side.start() for side in sides]
    [end.close() for end in ends]  # so that a side whose fellow dies is not left waiting
    raise SystemExit(any([side.join() or side.exitcode for side in sides]))
