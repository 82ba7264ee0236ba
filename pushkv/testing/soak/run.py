"""Episodes one after another, and the figures of all of them."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from pushkv.core.consumer import ConsumerMachine
from pushkv.core.producer import ProducerMachine
from pushkv.testing.broken import Broken
from pushkv.testing.soak.episode import Episode, Tally
from pushkv.testing.soak.settings import Settings


@dataclass
class Figures:
    """What came of a soak."""

    seed: int
    tallies: list[Tally] = field(default_factory=list)
    failure: str = ""
    wall_s: float = 0.0

    def total(self, name: str) -> int:
        """A number, summed over the episodes."""
        return sum(int(getattr(tally, name)) for tally in self.tallies)

    def counts(self, name: str) -> str:
        """Counts, summed over the episodes, the most frequent first."""
        merged: Counter[str] = Counter()
        for tally in self.tallies:
            merged.update(getattr(tally, name))
        return ", ".join(f"{what} {count}" for what, count in merged.most_common())

    def fingerprint(self) -> str:
        """A digest of everything that happened and when."""
        joined = "".join(tally.fingerprint for tally in self.tallies)
        return hashlib.blake2b(joined.encode(), digest_size=16).hexdigest()

    def report(self) -> str:
        """The figures in lines."""
        lines = {
            "seed": self.seed,
            "episodes": len(self.tallies),
            "transfers": self.total("transfers"),
            "outcomes at consumers": self.counts("consumer"),
            "outcomes at producers": self.counts("producer"),
            "apart (producer / consumer)": self.counts("apart"),
            "faults": self.counts("faults"),
            "proofs": self.counts("proofs"),
            "bytes landed": self.total("landed_bytes"),
            "of these late, in kept blocks": self.total("late_bytes"),
            "quarantined at rest, for failed WRITEs": f"{self.total('quarantined')} target and "
            f"{self.total('stuck')} source blocks, all back after proof",
            "virtual seconds": self.total("seconds"),
            "wall seconds": f"{self.wall_s:.0f}",
            "fingerprint": self.fingerprint(),
            "verdict": f"BROKEN: {self.failure}" if self.failure else "every rule held",
        }
        return "\n".join(f"{name}: {value}" for name, value in lines.items())


def soak(
    figures: Figures,
    transfers: int,
    each: int = 2000,
    first: int = 0,
    *,
    landing: bool = False,
    verify: bool = False,
    layers: bool = False,
    producer: type[ProducerMachine] = ProducerMachine,
    consumer: type[ConsumerMachine] = ConsumerMachine,
    progress: Callable[[str], None] = lambda line: None,
) -> None:
    """Run as many transfers, in episodes of ``each`` from number ``first`` on. Raises Broken."""
    started, number, left = time.monotonic(), first, transfers
    while left > 0:
        settings = Settings.draw(f"{figures.seed}/{number}", min(each, left), landing, verify, layers)
        episode = Episode(settings, producer, consumer)
        try:
            tally = episode.run()
        except (Broken, Exception) as error:
            figures.failure = f"episode {number} of seed {figures.seed} at {episode.clock():.3f} s: {error!r}"
            progress("\n".join(episode.recent))
            raise
        finally:
            figures.wall_s = time.monotonic() - started
        figures.tallies.append(tally)
        progress(f"episode {number}: {tally.transfers} transfers, {dict(tally.consumer)}")
        left -= tally.transfers
        number += 1
