"""One process of the demo: a rank of the prefill or the decode engine."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from pushkv import Consumer, EndpointConfig, KVCache, Producer, shard
from pushkv.demo.decoding import Decode
from pushkv.demo.engine import Engine, Place, RouterGone
from pushkv.demo.environment import belong_to_parent
from pushkv.demo.group import Group, Pipe
from pushkv.demo.model import Model
from pushkv.demo.paged import PagedCache
from pushkv.demo.prefilling import Prefill
from pushkv.demo.settings import RankSpec, Side
from pushkv.demo.weights import Weights
from pushkv.demo.words import Connect, Connected, Failure, Ready, Report
from pushkv.errors import PushKVError
from pushkv.trace import Trace

SWITCH_INTERVAL_S = 50e-6
"""After how long a busy engine thread yields the GIL to the transfer thread; Python's default is 5 ms."""


SLOT_BYTES = 1 << 20
"""Of a landing slot, where parts land: some chunks are one part, some several."""


def run_rank(spec: RankSpec, router: Pipe, group: Sequence[Pipe]) -> None:
    """Run an engine until the router ends it. What goes wrong is told to the router in one sentence."""
    belong_to_parent()
    logging.basicConfig(level=logging.ERROR, format=f"{spec.name}: %(message)s")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        _serve(Place(spec, Group(spec.rank, spec.layout.tp, group), router, Trace(spec.name)))
    except PushKVError as error:
        router.send(Failure(str(error)))
        sys.exit(1)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        sys.exit(1)  # the router or another rank is gone, and the router knows or needs no word


def _serve(place: Place) -> None:
    settings, layout = place.spec.settings, place.spec.layout
    weights = Weights.seeded(settings.model, settings.weights_seed)
    model = Model(
        settings.model, weights, rank=place.spec.rank, size=layout.tp, all_reduce=place.group.all_reduce
    )  # fmt: skip
    cache = model.cache(place.spec.blocks, layout.block_size, order=layout.axes)
    if place.spec.side is Side.PREFILL:
        _prefill(place, model, cache)
    else:
        _decode(place, model, cache)


def _described(spec: RankSpec, cache: PagedCache) -> KVCache:
    """The cache as PushKV takes it; the factors make two sides with other models refuse one another."""
    settings = spec.settings
    return KVCache.of(
        cache.array,
        cache.order,
        layers=settings.model.layer_names,
        shard=shard(settings.model.kv_heads, spec.rank, spec.layout.tp),
        model="pushkv demo",
        weights=settings.weights_seed,
    )


def _config(spec: RankSpec) -> EndpointConfig:
    return EndpointConfig(
        engine=spec.side.value,
        rank=spec.rank,
        landing=spec.settings.landing,
        landing_bytes=8 * SLOT_BYTES,
        slot_bytes=SLOT_BYTES,
        stream=spec.settings.stream,
    )


def _prefill(place: Place, model: Model, cache: PagedCache) -> None:
    with Producer(_config(place.spec), _described(place.spec, cache), trace=place.trace) as producer:
        place.pipe.send(Ready(producer.address))
        engine = Prefill(place, model, cache, producer)
        engine.run()
        _report(engine, producer.stats(), producer.close(), {})


def _decode(place: Place, model: Model, cache: PagedCache) -> None:
    with Consumer(_config(place.spec), _described(place.spec, cache), trace=place.trace) as consumer:
        place.pipe.send(Ready())
        word = place.pipe.recv()
        if not isinstance(word, Connect):
            raise RouterGone(f"{place.spec.name} was sent {word!r}; it takes the addresses first")
        link = consumer.connect(word.addresses)
        place.pipe.send(Connected("; ".join(dict.fromkeys(consumer.path(agent) for agent in link.agents))))
        engine = Decode(place, model, cache, consumer, link)
        engine.run()
        _report(engine, consumer.stats(), consumer.close(), engine.keys)


def _report(engine: Engine, stats: dict[str, int], closed: bool, keys: dict[str, str]) -> None:
    back = engine.pool.free_count == engine.pool.blocks
    recording = engine.place.trace.recording()
    engine.place.pipe.send(Report(recording, stats, engine.outcomes, back, closed, keys))
