"""Machines that are wrong about layers: what is computed, sent or there of tokens need not be all of their layers."""

from __future__ import annotations

import msgspec

from pushkv.core.consumer import ConsumerMachine
from pushkv.core.messages import Complete
from pushkv.core.producer import ProducerMachine
from pushkv.core.sending import Serving
from pushkv.core.stages import Stage


class BegunIsComputed(ProducerMachine):
    """Tokens of which the first layers are computed are taken for computed."""

    def _advance(self, serving: Serving, stage: Stage, now: float) -> None:
        if stage.ahead is not None:
            stage.ready, stage.ahead = stage.ahead.until, None
        super()._advance(serving, stage, now)


class SendsBegunAgain(ProducerMachine):
    """Which layers were sent of tokens is forgotten when the others come."""

    def _advance(self, serving: Serving, stage: Stage, now: float) -> None:
        if serving.ahead is not None and stage.ready >= serving.ahead.until:
            serving.ahead = None
        super()._advance(serving, stage, now)


class LayersAreTokens(ConsumerMachine):
    """Tokens of which some layers have arrived are taken for arrived."""

    def _on_complete(self, peer: str, message: Complete, now: float) -> None:
        spans = tuple(msgspec.structs.replace(span, layer_start=0, layer_stop=2) for span in message.spans)
        super()._on_complete(peer, msgspec.structs.replace(message, spans=spans), now)
