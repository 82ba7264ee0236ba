"""The rules that are checked when a process ends, when nothing goes wrong any more, and in the end."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from pushkv.core.messages import TransferKey
from pushkv.core.outcome import Outcome
from pushkv.core.states import Source, Target
from pushkv.runtime.peering import FORMER
from pushkv.runtime.slots import pool_of
from pushkv.testing.broken import Broken, Rule
from pushkv.testing.soak.lives import ConsumerLife, Life, ProducerLife
from pushkv.testing.soak.requests import Offered
from pushkv.testing.soak.stagings import Lot
from pushkv.testing.soak.witness import Served

if TYPE_CHECKING:
    from pushkv.testing.soak.episode import Episode


def at_rest(life: Life) -> bool:
    """Whether nothing is open, and custody lasts only where nothing but proof can end it."""
    if isinstance(life, ConsumerLife):
        custody = set(life.machine.custody())
        return not life.machine.open_transfers and custody <= {Target.QUARANTINED, Target.ENDED}
    assert isinstance(life, ProducerLife)
    return not life.machine.open_transfers and set(life.machine.custody()) <= {Source.STUCK}


def check_life(episode: Episode, life: Life) -> None:
    """What must hold of a life at any time, looked at before it ends: canaries, errors, bytes. Raises Broken."""
    life.ledger.check()
    if life.side.shared.stats["errors"]:
        raise Broken(Rule.ERROR, f"{life.side.shared.stats['errors']} at {life.name}")
    for owner in life.ledger.owned():
        if isinstance(owner, Offered):
            owner.check()
    for name, count in life.side.shared.stats.items():
        if name.startswith("proof"):
            episode.tally.proofs[name] += count
    _check_bounds(episode, life)


def check_calm(episode: Episode) -> None:
    """Nothing goes wrong any more, and all is at rest: what is still held must be explained. Raises Broken."""
    for life in episode.lives():
        for owner in life.ledger.owned():
            _explain(episode, life, owner)
    for transfer in episode.transfers.values():
        if transfer.life.alive and transfer.outcome is None:
            raise Broken(Rule.ONCE, f"{transfer.key} has no outcome at {transfer.life.name}")
    for served in episode.served:
        if served.outcome is None and episode.life_of(served.producer) is not None:
            raise Broken(Rule.ONCE, f"{served.key} has no outcome at {served.producer}")
    _check_agreement(episode)


def _explain(episode: Episode, life: Life, owner: object) -> None:
    """Blocks are only held for a WRITE that failed, or where a data mover is stuck."""
    if life.side.transport is None:
        return
    if episode.settings.landing:
        raise Broken(Rule.LOST, f"{life.name} still holds blocks of {owner}, which no WRITE can reach")
    if isinstance(owner, Offered):
        episode.tally.quarantined += len(owner.blocks or ())
        peers = [(agent, life.agent) for agent in owner.owers]
    else:
        assert isinstance(owner, Lot)
        episode.tally.stuck += len(owner.blocks)
        peers = [(life.agent, one.agent) for one in episode.lives() if one.role == "decode"]
    if not any(pair in episode.landings.failures or _is_stuck(episode, pair) for pair in peers):
        what = owner.key if isinstance(owner, Offered) else owner.staging.request.name
        raise Broken(Rule.LOST, f"{life.name} still holds blocks for {what}, and no WRITE of theirs has failed")


def _is_stuck(episode: Episode, pair: tuple[str, str]) -> bool:
    lives = [episode.life_of(agent) for agent in pair]
    return any(life is not None and life.side.transport is None for life in lives)


def _check_agreement(episode: Episode) -> None:
    """Where a word could cross, the two sides say the same, or 'complete' at the producer alone."""
    by_key: dict[TransferKey, list[Served]] = defaultdict(list)
    for served in episode.served:
        if served.outcome is not None:
            by_key[served.key].append(served)
    for key, ends in by_key.items():
        mine = episode.transfers[key].outcome
        if mine is not None:
            for served in ends:
                _agree(episode, served, mine)
            everyone = {served.producer for served in ends} >= set(episode.transfers[key].owers)
            if mine.rejected and everyone and all(one.outcome is Outcome.COMPLETE for one in ends):
                raise Broken(Rule.AGREEMENT, f"{key} is {mine.value} at the consumer, complete at every producer")


def _agree(episode: Episode, served: Served, mine: Outcome) -> None:
    theirs = served.outcome
    assert theirs is not None
    if theirs is mine:
        return
    if theirs is Outcome.COMPLETE or served.alone:
        episode.tally.apart[f"{theirs.value} / {mine.value}"] += 1
        return
    told = f"{mine.value} at the consumer and {theirs.value} at {served.producer}, which was answered"
    raise Broken(Rule.AGREEMENT, f"{served.key} is {told}")


def check_end(episode: Episode) -> None:
    """One side is gone and the other has everything back: nothing may be left anywhere. Raises Broken."""
    for life in episode.lives():
        check_life(episode, life)
        if life.ledger.free != len(life.ledger):
            raise Broken(Rule.LOST, f"{life.name} has {life.ledger.free} of {len(life.ledger)} blocks")
        _check_empty(life)


def _check_bounds(episode: Episode, life: Life) -> None:
    window, side = episode.settings.limits.window, life.side
    if len(side.pairs) > len(side.agents) * (FORMER + 2):
        raise Broken(Rule.BOUNDED, f"{life.name} knows {len(side.pairs)} tokens of {len(side.agents)} peers")
    if isinstance(life, ProducerLife):
        for customer in life.machine._book.customers.values():
            if len(customer.dead) + len(customer.live) > window:
                raise Broken(Rule.BOUNDED, f"{life.name} remembers more than its window of {window}")
        if life.machine._book.unmatched > episode.settings.limits.unmatched + len(life.machine._stages):
            raise Broken(Rule.BOUNDED, f"{life.name} has {life.machine._book.unmatched} offers without a stage")


def _check_empty(life: Life) -> None:
    left = tables(life)
    if any(left.values()):
        full = ", ".join(f"{count} {name}" for name, count in left.items() if count)
        raise Broken(Rule.BOUNDED, f"{life.name} still remembers {full}")


def tables(life: Life) -> dict[str, int]:
    """The sizes of the tables that are empty when all is over."""
    side = life.side
    pool = pool_of(side.shared.slots)
    common = {
        "peers": len(side.agents),
        "tokens": len(side.pairs),
        "commands": len(side._pending),
        "slots": pool.count - len(pool),
        "copies": int(side.copier.busy),
    }
    if isinstance(life, ConsumerLife):
        machine = life.machine
        return common | {
            "transfers": len(machine._transfers),
            "nonces": len(machine._nonces),
            "attempts": len(machine._newest),
            "held blocks": machine.held_blocks(),
            "pairings": len(machine._pairings),
            "timers": sum(1 for _ in machine.timers.pending()),
            "blocks": len(side._blocks) + len(side._refused),
            "parts to verify": len(side._offers) + len(side._looks) + len(side._fading),
        }
    assert isinstance(life, ProducerLife)
    book = life.machine._book
    return common | {
        "customers": len(book.customers),
        "offers": len(book._by_transfer),
        "WRITEs": len(book._by_write) + len(side._writes) + len(side._warming),
        "stages": len(life.machine._stages) + len(side._open) + len(side._holding) + len(side._fenced),
        "unmatched offers": book.unmatched,
        "timers": sum(1 for _ in life.machine.timers.pending()),
    }


def open_ends(episode: Episode) -> str:
    """What is not at rest, in words."""
    words = []
    for life in episode.lives():
        machine = life.machine
        words.append(f"{life.name}: {machine.open_transfers} open, custody {dict(machine.custody())}, "
                     f"{len(life.ledger.owned())} owners")  # fmt: skip
    return "; ".join(words)
