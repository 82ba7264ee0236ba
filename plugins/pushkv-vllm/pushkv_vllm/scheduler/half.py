"""The connector beside the scheduler: what vLLM calls there, told to the decode and the prefill half."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from pushkv_vllm import compat
from pushkv_vllm.context import Context
from pushkv_vllm.directives import Directives, Reports
from pushkv_vllm.log import logger
from pushkv_vllm.params import DecodeLeg, ParamsError, PrefillLeg, answer, parse
from pushkv_vllm.pins import Pins
from pushkv_vllm.scheduler.decode import DecodeScheduler
from pushkv_vllm.scheduler.prefill import PrefillScheduler
from pushkv_vllm.settings import Settings
from pushkv_vllm.stats import PushKVStats, Tally
from pushkv_vllm.wake import Alarm

QUIET_STEPS = 3
"""So many steps without tokens before the scheduler sleeps in one: before that, outputs may still be on their way."""
PATIENCE = 10.0
"""For how many seconds after the last news the engine is kept stepping for what is pinned."""


class SchedulerHalf:
    """Both roles' scheduler halves, and the sleep in steps that have nothing to do."""

    def __init__(self, vllm_config: Any, settings: Settings, kv_cache_config: Any) -> None:
        config, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        ranks = int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size)
        self._settings = settings
        self._engine = str(config.engine_id)
        self._host = settings.advertise or settings.host
        self._port = settings.port + int(getattr(parallel, "data_parallel_index", 0) or 0)
        self._ranks = ranks
        self._pins = Pins()
        self._alarm = Alarm()
        context = Context.of(parallel)
        sizes = [context.tokens_a_block(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
        self._decode = DecodeScheduler(self._pins, ranks, sizes, settings.deadline) if config.is_kv_consumer else None
        self._prefill = PrefillScheduler(self._pins, ranks) if config.is_kv_producer else None
        # Ranks of a data-parallel mixture of experts step in lockstep: one that slept would hold the others up.
        self._may_sleep = settings.idle_wait > 0 and int(parallel.data_parallel_size) == 1
        self._quiet = 0
        self._heard = time.monotonic()
        self._tally = Tally()

    def bind(self, pool: Any) -> None:
        """Take the engine's block pool."""
        self._pins.bind(pool)

    # Requests

    def new_request(self, request: Any) -> None:
        """Read a request's parameters. What cannot be followed fails by the engine's policy, and alone."""
        try:
            leg = parse(request.request_id, request.kv_transfer_params, self._settings.producers)
        except ParamsError as error:
            logger.warning("%s", error)
            if self._decode is not None and _wants_decode(request.kv_transfer_params):
                self._decode.add(request, None, str(error))
            return
        if isinstance(leg, DecodeLeg):
            self._new_decode(request, leg)
        elif isinstance(leg, PrefillLeg):
            self._new_prefill(request, leg)

    def _new_decode(self, request: Any, leg: DecodeLeg) -> None:
        if self._decode is None:
            logger.warning("%s is a decode leg and this engine's kv_role does not consume; its prompt is computed.",
                           request.request_id)  # fmt: skip
            return
        self._decode.add(request, leg)

    def _new_prefill(self, request: Any, leg: PrefillLeg) -> None:
        if self._prefill is None:
            logger.warning("%s is a prefill leg and this engine's kv_role does not produce; nothing is sent.",
                           request.request_id)  # fmt: skip
            return
        transfer = leg.transfer or f"{self._engine}/{request.request_id}/{secrets.token_hex(8)}"
        if why := self._prefill.add(request, transfer):
            logger.warning("%s will not be sent: %s.", request.request_id, why)

    def missing(self, request: Any, local: int) -> int:
        """How many tokens are to come from elsewhere."""
        return self._decode.missing(request, local) if self._decode is not None else 0

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """The engine has given a request blocks."""
        if self._decode is not None:
            self._decode.allocated(request, blocks.get_block_ids(), external)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """A request is over; what a prefill leg answers."""
        name = request.request_id
        if self._decode is not None:
            self._decode.finished(request)
        if self._prefill is None or not (transfer := self._prefill.transfer_of(name)):
            return None
        whole = request.status.name in ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
        if not self._prefill.finished(name, whole=whole):
            return None
        return answer(transfer, self._engine, self._host, self._port, self._ranks, name)

    # Steps

    def directives(self, scheduler_output: Any) -> Directives:
        """What the workers are to do in this step; where that is nothing, sleep until there is news."""
        tokens = int(scheduler_output.total_num_scheduled_tokens)
        if self._prefill is not None:
            self._follow(self._prefill, scheduler_output)
        offers, cancels, declines = self._decode.take() if self._decode is not None else ((), (), ())
        if offers:  # what has rung since the last load would leave no room for these loads' news
            self._take_news()
        parts, reclaims, unstages = self._prefill.take() if self._prefill is not None else ((), (), ())
        made = Directives(tokens, self._alarm.doorbell, offers, cancels, declines, parts, reclaims, unstages)
        self._quiet = 0 if tokens or made.urgent else self._quiet + 1
        sleepy = self._may_sleep and self._quiet >= QUIET_STEPS and self._waiting
        if sleepy and self._alarm.sleep(self._settings.idle_wait):
            self._quiet = 0  # what has woken it is in outputs that are still on their way
        return made

    @staticmethod
    def _follow(prefill: PrefillScheduler, output: Any) -> None:
        """What this step preempts, allocates and computes."""
        for name in output.preempted_req_ids or ():
            prefill.preempted(name)
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            prefill.scheduled(new.req_id, compat.table_now(output, new.req_id) or new.block_ids, replaces=True)
            prefill.computes(new.req_id, new.num_computed_tokens + scheduled.get(new.req_id, 0))
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            table = compat.table_now(output, name) if prefill.transfer_of(name) else None
            if table is not None or blocks is not None:
                replaces = table is not None or name in cached.resumed_req_ids
                prefill.scheduled(name, table or blocks, replaces=replaces)
            prefill.computes(name, computed + scheduled.get(name, 0))

    def output(self, connector_output: Any) -> None:
        """What the workers report."""
        reports = connector_output.kv_connector_worker_meta
        received = self._received(connector_output)
        if (isinstance(reports, Reports) and reports.news) or received:
            self._heard, self._quiet = time.monotonic(), 0
        if self._decode is not None:
            self._decode.received(received, reports.failed if isinstance(reports, Reports) else {})
        if isinstance(reports, Reports):
            for half in (self._decode, self._prefill):
                if half is not None:
                    half.reports(reports)

    def _received(self, connector_output: Any) -> Iterable[str]:
        """The loads that the engine is to hear of now: what it is to hear, it takes from this output."""
        if self._decode is None:
            return ()
        if self._decode.arrivals.expected:
            self._take_news()
        received = self._decode.arrivals.received(connector_output.finished_recving or ())
        connector_output.finished_recving = received or None
        return received

    def _take_news(self) -> None:
        """Take what workers have told at once of loads."""
        assert self._decode is not None
        for rank, load in self._alarm.news():
            self._decode.arrivals.tell(rank, load)

    @property
    def _waiting(self) -> bool:
        return any(half is not None and half.waiting for half in (self._decode, self._prefill))

    @property
    def pending(self) -> bool:
        """Whether blocks are pinned for requests that may be over, and news of them has come lately.

        Without the latter they wait for proof that may never come; the next request's steps take it.
        """
        pinned = any(half is not None and half.pinned for half in (self._decode, self._prefill))
        longest = self._settings.hold + PATIENCE if self._prefill is not None else PATIENCE
        return pinned and time.monotonic() - self._heard < longest

    def stats(self) -> PushKVStats | None:
        """What has been counted here since the last time."""
        counts: Counter[str] = Counter()
        for half in (self._decode, self._prefill):
            if half is not None:
                counts.update(half.counts)
        return self._tally.take(counts, {"pinned blocks": len(self._pins)}, [])

    def close(self) -> None:
        """Listen to no worker any more."""
        self._alarm.close()


def _wants_decode(params: object) -> bool:
    return isinstance(params, dict) and bool(params.get("do_remote_prefill"))
