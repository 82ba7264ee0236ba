"""The numbers that bound the protocol, in seconds and in counts."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one endpoint's protocol machine.

    ``deadline``: by when a transfer ends, counted at the consumer from the offer over all queueing.
    ``lease``: how long after an offer or a Renew the producer may still start something for it.
    ``stage_deadline``: how long staged blocks wait for offers.
    ``resend``: the first wait for an answer; it doubles up to ``resend_most``. From the ``insist_after``-th resend
    on a message goes over the control connection.
    ``window``: how many offers to one producer rank may be open; ``unmatched`` how many offers without a stage and
    staged prompts without an offer a producer holds.
    ``ask_proof``: how often the transport is asked whether a lost peer's WRITEs have ended.
    """

    deadline: float = 120.0
    lease: float = 10.0
    stage_deadline: float = 120.0
    resend: float = 0.1
    resend_most: float = 2.0
    insist_after: int = 2
    window: int = 4096
    unmatched: int = 4096
    ask_proof: float = 0.1

    @property
    def renew(self) -> float:
        """Seconds between renewals of open offers: a quarter of a lease, so that two lost in a row do not end it."""
        return self.lease / 4

    def resend_wait(self, tries: int) -> float:
        """How long to wait for an answer after the ``tries``-th sending."""
        wait: float = self.resend * 2**tries
        return min(wait, self.resend_most)

    def most_tries(self) -> int:
        """Where counting tries stops to matter."""
        tries = self.insist_after
        while self.resend_wait(tries) < self.resend_most:
            tries += 1
        return tries
