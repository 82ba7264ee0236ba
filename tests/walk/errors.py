"""What a walk reports."""

from __future__ import annotations


class Violation(Exception):
    """A rule was broken; the message begins with the rule's name."""
