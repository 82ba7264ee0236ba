"""What a soak or a chaos run finds wrong."""

from __future__ import annotations

from enum import Enum


class Rule(Enum):
    """What was broken; the words are those of the design's rules."""

    CANARY = "a block outside custody was touched"
    TARGET = "a WRITE lands in blocks that are not its transfer's"
    SOURCE = "a WRITE reads blocks that its stage has given back"
    BYTES = "the bytes of a transfer are wrong"
    ONCE = "a transfer has no outcome, or two"
    AGREEMENT = "the two sides' outcomes contradict each other"
    LOST = "blocks do not come back"
    BOUNDED = "a table grows"
    ERROR = "an error in a transfer thread"
    HANGS = "nothing more happens"


class Broken(BaseException):
    """A rule does not hold. No Exception, so that no part of PushKV which survives its errors hides it."""

    def __init__(self, rule: Rule, detail: str) -> None:
        super().__init__(f"{rule.value}: {detail}")
        self.rule = rule
