"""A decode worker's connections to prefill engines, made when they are first named and again when they are lost."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pushkv import Consumer, Link, PushKVError

AGAIN = 0.5
"""Seconds between attempts at one address."""
MOST = 4096
"""How many things may wait for one connection."""


@dataclass
class _Way:
    """What is known of one prefill engine."""

    link: Link | None = None
    trying: bool = False
    tried: float = 0.0
    failed: float = -1.0
    why: str = ""
    then: list[Callable[[Link], object]] = field(default_factory=list)
    """What to do once it is connected; forgotten where that fails."""


class Links:
    """``changed`` is called, on another thread, when an attempt has come to an end."""

    def __init__(self, consumer: Consumer, changed: Callable[[], None]) -> None:
        self._consumer = consumer
        self._changed = changed
        self._ways: dict[str, _Way] = {}
        self._closed = False

    def find(self, address: str, since: float) -> Link | None:
        """The link to a prefill engine, None while it is being connected.

        Raises ConnectionError where an attempt that began at or after ``since`` (``time.monotonic()``) has failed.
        """
        way = self._ways.setdefault(address, _Way())
        if way.link is not None and way.link.alive:
            return way.link
        if way.failed >= since:
            raise ConnectionError(way.why)
        now = time.monotonic()
        if not way.trying and now - way.tried >= AGAIN and not self._closed:
            way.trying, way.tried = True, now
            threading.Thread(target=self._try, args=(address, way), name="pushkv-connect", daemon=True).start()
        return None

    def once(self, address: str, act: Callable[[Link], object]) -> None:
        """Do something with the link to a prefill engine: now, or on another thread when it is connected."""
        way = self._ways.setdefault(address, _Way())
        if way.link is not None and way.link.alive:
            act(way.link)
        elif len(way.then) < MOST:
            way.then.append(act)
            with contextlib.suppress(ConnectionError):
                self.find(address, time.monotonic())

    def _try(self, address: str, way: _Way) -> None:
        """Connect anew: a restarted engine's ranks may be elsewhere."""
        began = time.monotonic()
        try:
            link = self._consumer.connect_engine(address)
        except PushKVError as error:
            way.failed, way.why = began, str(error)
            way.then.clear()
        else:
            former, way.link = way.link, link
            if former is not None and former.routes != link.routes:
                self._consumer.disconnect(former)
            while way.then:
                way.then.pop()(link)
        finally:
            way.trying = False
            self._changed()

    def close(self) -> None:
        """Make no more attempts."""
        self._closed = True
