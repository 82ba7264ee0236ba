"""Walk the protocol machines and print what was seen: ``python tests/walk [--mutants | --full | --everything]``.

``--everything`` takes all processors (32 of them ten minutes) and some 80 GB, for one walk over all bounds at once.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from walk import parallel
from walk.mutants import MUTANTS
from walk.search import Walked
from walk.walks import EVERYTHING, LARGER_WALKS, LONG_WALKS, WALKS

RULES = (
    "custody ends on proof: no byte lands in a block that is not, or no longer, its transfer's",
    "sources are held: no block is given back to the producer's engine while a WRITE may read it",
    "one outcome: every transfer ends once a side",
    "complete means covered: a consumer says complete only of what has landed, all of it, from every rank",
    "agreement: where the consumer is complete, no rank has failed after it asked; where all ranks are, no rejection",
    "posted once: no layer of a token of an offer is written twice",
    "sent once computed: no WRITE reads a layer of a token that the engine has not staged",
    "superseded: nothing is posted for an attempt that a later one was offered after",
    "nothing hangs: what is open, drains or waits for proof has a timer, each rank is told; in fair weather all ends",
    "the tables: no machine tries a transition that its table does not have",
)


def main(arguments: list[str]) -> int:
    """Print the walks, or the mutants; 1 where a rule broke, or a mutant lived."""
    print("The rules that are checked in every state:", *RULES, sep="\n  ", end="\n\n")
    if "--mutants" in arguments:
        return _mutants()
    if "--everything" in arguments:
        began = time.monotonic()
        seen = parallel.walk(EVERYTHING.bounds, os.cpu_count() or 1, told=lambda words: print(words, flush=True))
        return int(_bad(EVERYTHING.name, seen, time.monotonic() - began))
    bad = 0
    for each in LARGER_WALKS if "--full" in arguments else (*WALKS, *LONG_WALKS):
        began = time.process_time()
        seen = each.run()
        bad += _bad(each.name, seen, time.process_time() - began)
    return int(bad > 0)


def _bad(name: str, seen: Walked, took: float) -> bool:
    print(f"{name}\n  {seen.states:,} joint states visited, {seen.transitions:,} transitions, ", end="")
    print(f"{seen.producer_states:,} producer and {seen.consumer_states:,} consumer states, {took:.0f} s")
    print(f"  {seen.broken or ('every rule holds' if seen.whole else 'not walked to the end')}", flush=True)
    return bool(seen.broken) or not seen.whole


def _mutants() -> int:
    lived = 0
    for mutant in MUTANTS:
        seen = mutant.hunt()
        caught = seen.broken.startswith(mutant.caught_by)
        lived += not caught
        print(f"{mutant.name} ({mutant.rule}): {seen.broken or 'not caught'}, after {seen.states} states")
        print(*(f"    {step}" for step in seen.path), sep="\n")
    return int(lived > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
