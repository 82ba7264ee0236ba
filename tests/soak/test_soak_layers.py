"""The soak with layers staged apart: every rule holds, and a machine that sends one too early is found out."""

from __future__ import annotations

import pytest

from pushkv.core.producer import ProducerMachine
from pushkv.core.sending import Serving
from pushkv.core.stages import Stage
from pushkv.testing.broken import Broken, Rule
from pushkv.testing.soak.run import Figures, soak

SEED = 20


@pytest.mark.timeout(600)
@pytest.mark.parametrize("landing", [False, True], ids=["direct", "landing"])
def test_transfers_layer_by_layer(landing: bool) -> None:
    figures = Figures(SEED)
    soak(figures, 3000, 1000, layers=True, landing=landing)
    print(figures.report())
    assert figures.total("late_bytes") > 0, "something has landed late, and in kept memory"


class BegunIsComputed(ProducerMachine):
    """Takes tokens of which the first layer is there for computed."""

    def _advance(self, serving: Serving, stage: Stage, now: float) -> None:
        if stage.ahead is not None:
            stage.ready, stage.ahead = stage.ahead.until, None
        super()._advance(serving, stage, now)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("landing", [False, True], ids=["direct", "landing"])
def test_a_machine_that_sends_what_is_not_computed_is_found_out(landing: bool) -> None:
    figures = Figures(SEED)
    with pytest.raises(Broken) as found:
        soak(figures, 6000, 500, layers=True, landing=landing, producer=BegunIsComputed)
    assert found.value.rule is Rule.BYTES, figures.failure
