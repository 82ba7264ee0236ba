"""What an operator asks of a running endpoint, over its control port."""

from __future__ import annotations

import time

from pushkv.errors import ConfigError, HandshakeError, ProtocolError
from pushkv.runtime import wire
from pushkv.runtime.address import parse_dialled, url
from pushkv.runtime.keys import load_keys
from pushkv.runtime.lines import Lines

LONGEST = 3600.0
"""Seconds that a fence may be given."""


def ask_to_fence(address: str, timeout: float, key_file: str = "") -> wire.Fenced:
    """Have the endpoint at ``address`` fence within ``timeout`` seconds, and wait for its answer.

    Raises AddressError, ConfigError for a timeout out of range, and HandshakeError where no answer comes.
    """
    if not 0 < timeout <= LONGEST:
        raise ConfigError(f"timeout is {timeout:g} s; give seconds above 0, at most {LONGEST:g}.")
    route = url(parse_dialled(address))
    lines = Lines(load_keys(key_file), (), wire.MAX_CONTROL_FRAME)
    try:
        lines.dial(route)
        lines.send(route, wire.pack(wire.Fence(timeout)))
        answer = _answer(lines, time.monotonic() + timeout + 5.0)
    finally:
        lines.close()
    if answer is None:
        raise HandshakeError(f"{route} does not answer: is the endpoint running, and do both hold one cluster key?")
    return answer


def _answer(lines: Lines, deadline: float) -> wire.Fenced | None:
    while (left := deadline - time.monotonic()) > 0:
        for item in lines.receive(dict(lines.poller.poll(int(min(left, 0.5) * 1000) + 1))):
            try:
                message = None if item is None else wire.unpack(item[1])
            except ProtocolError:
                continue
            if isinstance(message, wire.Fenced):
                return message
    return None
