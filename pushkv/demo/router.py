"""A run of the demo: start the engines, dispatch the requests, gather what came of them.

Half of the requests are offered ahead: decode has offered its blocks before prefill is told of them. Of the other
half decode is told only when their prompts are computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pushkv.demo.crew import Crew, RankFailed
from pushkv.demo.environment import ONE_THREAD, environment
from pushkv.demo.generate import Generation, settled
from pushkv.demo.model import Model
from pushkv.demo.paged import BlockPool, blocks_for
from pushkv.demo.raw import measure
from pushkv.demo.settings import DemoSettings, RankSpec, Side
from pushkv.demo.weights import Weights
from pushkv.demo.words import Connect, Connected, Dispatch, Finish, Generated, Offered, Prefilled, Ready, Report
from pushkv.demo.workload import Request
from pushkv.trace import now
from pushkv.transport.nixl_import import find_nixl

RAW_BYTES = 1 << 20


@dataclass(frozen=True)
class Watch:
    """Who is told how a run goes: ``note`` gets a line at each stage, ``done`` a call for every finished request."""

    note: Callable[[str], None] = lambda line: None
    done: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Run:
    """What a run left behind, unjudged; times in nanoseconds of the trace's clock."""

    settings: DemoSettings
    requests: tuple[Request, ...]
    reference: Mapping[str, Generation]
    ahead: frozenset[str]
    generated: Mapping[str, Generated]
    reports: Mapping[RankSpec, Report]
    dispatched_ns: int
    finished_ns: int
    nixl: str
    path: str
    raw_seconds: tuple[float, ...]


def run_demo(settings: DemoSettings, watch: Watch | None = None) -> Run:
    """Run the demo. Raises TransportUnavailable without NIXL, RankFailed and ConfigError."""
    watch = watch or Watch()
    nixl = find_nixl()
    watch.note("generating in one process, for reference")
    requests, reference = _reference(settings)
    raw = _raw(settings, watch)
    specs = tuple(
        RankSpec(settings, side, rank, settings.blocks(side, requests))
        for side in Side
        for rank in range(settings.layout(side).tp)
    )
    with Crew(specs, settings.limit) as crew:
        path = _connect(crew, watch)
        ahead = frozenset(request.name for request in requests[::2])
        dispatched = now()
        generated = _dispatch(crew, settings, requests, ahead, watch)
        finished = now()
        # Decode first: prefill's last stages end when decode has what it wants.
        reports = _finish(crew, Side.DECODE) | _finish(crew, Side.PREFILL)
    name = f"NIXL {nixl.version_text} ({nixl.module})"
    return Run(
        settings, requests, reference, ahead, generated, reports, dispatched, finished, name, path, raw
    )  # fmt: skip


def _reference(settings: DemoSettings) -> tuple[tuple[Request, ...], dict[str, Generation]]:
    model = Model(settings.model, Weights.seeded(settings.model, settings.weights_seed))
    lengths = [request.length for request in settings.workload.requests()]
    blocks = sum(blocks_for(length, settings.decode.block_size) for length in lengths)
    cache = model.cache(blocks, settings.decode.block_size)
    return settled(model, cache, BlockPool(blocks), settings.workload)


def _raw(settings: DemoSettings, watch: Watch) -> tuple[float, ...]:
    if not settings.raw_repeats:
        return ()
    watch.note("measuring a WRITE of NIXL alone, for comparison")
    with environment(ONE_THREAD):
        return tuple(measure([RAW_BYTES], settings.raw_repeats)[RAW_BYTES])


def _connect(crew: Crew, watch: Watch) -> str:
    """Start both sides and connect every decode rank to all prefill ranks; returns the path in words."""
    watch.note(f"starting prefill and decode (processes {', '.join(map(str, crew.pids))})")
    ready = sorted(crew.gather(Ready, *Side).items(), key=lambda item: item[0].rank)
    addresses = tuple(word.address for spec, word in ready if spec.side is Side.PREFILL)
    crew.tell(Side.DECODE, Connect(addresses), all_ranks=True)
    paths = [word.path for word in crew.gather(Connected, Side.DECODE).values()]
    path = "; ".join(dict.fromkeys(paths))
    watch.note(f"connected ({path})")
    return path


def _dispatch(
    crew: Crew, settings: DemoSettings, requests: tuple[Request, ...], ahead: frozenset[str], watch: Watch
) -> dict[str, Generated]:  # fmt: skip
    """Send every request to both sides, at the right time, and wait for what decode makes of them."""
    late = {request.name: request for request in requests if request.name not in ahead}
    offers = Counter[bool]()
    all_offers = {True: settings.decode.tp * len(ahead), False: settings.decode.tp * len(late)}
    generated: dict[str, Generated] = {}
    prefilled: set[str] = set()
    early = Dispatch(tuple(request for request in requests if request.name in ahead))
    crew.tell(Side.DECODE, early, all_ranks=True)
    # Words of different processes overtake one another, so each is waited for.
    while offers != all_offers or len(generated) + len(prefilled) < 2 * len(requests):
        for spec, word in crew.hear():
            if isinstance(word, Offered):
                offers[word.name in ahead] += 1
                if word.name in ahead and offers[True] == all_offers[True]:
                    crew.tell(Side.PREFILL, Dispatch(requests))
            elif isinstance(word, Prefilled):
                prefilled.add(word.name)
                if word.name in late:
                    crew.tell(Side.DECODE, Dispatch((late.pop(word.name),)), all_ranks=True)
            elif isinstance(word, Generated):
                generated[word.name] = word
                watch.done()
            else:
                raise RankFailed(f"{spec.name} says {word!r} while requests are under way")
    return generated


def _finish(crew: Crew, side: Side) -> dict[RankSpec, Report]:
    crew.tell(side, Finish())
    return crew.gather(Report, side)
