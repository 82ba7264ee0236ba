"""What a request's ``kv_transfer_params`` ask for.

Both legs of a dispatch carry the same ``transfer_id``, fresh for each dispatch, and may be sent at once::

    prefill  {"do_remote_decode": true, "transfer_id": T}
    decode   {"do_remote_prefill": true, "transfer_id": T, "remote_host": H, "remote_port": P}

Optional: ``n`` (how many siblings decode makes of the request), ``remote_dp_rank`` (added to the port),
``remote_engine_id`` (instead of host and port, where the decode engine knows it by its settings), ``deadline``
(seconds) and ``attempt``. Without ``transfer_id`` the prefill engine makes one up; its answer's parameters are then
what the decode leg is sent, as routers for vLLM's own connectors do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pushkv.errors import PushKVError

_SIBLING = re.compile(r"(\d+)_")


class ParamsError(PushKVError):
    """A request's ``kv_transfer_params`` cannot be followed."""


@dataclass(frozen=True)
class PrefillLeg:
    """The prompt is computed here and goes elsewhere. ``transfer`` is empty where one is to be made up."""

    transfer: str


@dataclass(frozen=True)
class DecodeLeg:
    """The prompt's KV comes from the prefill engine with a rank at ``address`` (host:port).

    ``sibling`` of ``siblings`` is which of a request with n > 1 this is; ``deadline`` in seconds, None for the
    setting's.
    """

    transfer: str
    address: str
    sibling: int = 0
    siblings: int = 1
    attempt: int = 0
    deadline: float | None = None


def parse(request: str, params: object, producers: Mapping[str, str]) -> PrefillLeg | DecodeLeg | None:
    """What request ``request`` (vLLM's internal id) asks for; None for nothing of ours.

    ``producers`` maps prefill engines' ids to addresses. Raises ParamsError.
    """
    if params is None or params == {}:
        return None
    if not isinstance(params, Mapping):
        raise ParamsError(f"kv_transfer_params of {request} are {params!r:.80}; give a mapping.")
    decodes, prefills = params.get("do_remote_prefill"), params.get("do_remote_decode")
    if decodes and prefills:
        raise ParamsError(f"{request} asks for do_remote_prefill and do_remote_decode at once; give one of them.")
    if prefills:
        return PrefillLeg(_transfer(request, params, required=False))
    return _decode_leg(request, params, producers) if decodes else None


def _decode_leg(request: str, params: Mapping[str, Any], producers: Mapping[str, str]) -> DecodeLeg:
    siblings = _whole(request, params, "n", 1, least=1)
    match = _SIBLING.match(request) if siblings > 1 else None
    sibling = int(match[1]) if match else 0
    if sibling >= siblings:
        raise ParamsError(f"{request} is sibling {sibling} of n = {siblings}; n must be what the request asks for.")
    deadline = params.get("deadline")
    if deadline is not None and not (isinstance(deadline, (int, float)) and 0 < deadline <= 86400):
        raise ParamsError(f"deadline of {request} is {deadline!r:.40}; give seconds above 0, at most a day.")
    return DecodeLeg(
        _transfer(request, params, required=True),
        _address(request, params, producers),
        sibling,
        siblings,
        _whole(request, params, "attempt", 0),
        None if deadline is None else float(deadline),
    )


def _transfer(request: str, params: Mapping[str, Any], *, required: bool) -> str:
    transfer = params.get("transfer_id")
    if transfer is None and not required:
        return ""
    if not isinstance(transfer, str) or not 0 < len(transfer) <= 512 or not transfer.isprintable():
        raise ParamsError(
            f"transfer_id of {request} is {transfer!r:.80}; give both legs the same text of 1 to 512 characters, "
            "fresh for each dispatch, or send decode the parameters that prefill has answered."
        )
    return transfer


def _address(request: str, params: Mapping[str, Any], producers: Mapping[str, str]) -> str:
    host, port, engine = (params.get(name) for name in ("remote_host", "remote_port", "remote_engine_id"))
    if host is None and isinstance(engine, str) and engine in producers:
        return producers[engine]
    if not isinstance(host, str) or not host or "/" in host:
        known = ", ".join(sorted(producers)) or "none"
        raise ParamsError(
            f"{request} names prefill engine {engine!r:.80} and remote_host {host!r:.80}; give remote_host and "
            f"remote_port, or an engine of the setting producers (known: {known})."
        )
    try:
        number = int(port)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = 0
    number += _whole(request, params, "remote_dp_rank", 0)
    if isinstance(port, bool) or not 0 < number <= 65535:
        raise ParamsError(f"remote_port of {request} is {port!r:.40}; give a port from 1 to 65535.")
    plain = host.removeprefix("[").removesuffix("]")
    return f"[{plain}]:{number}" if ":" in plain else f"{plain}:{number}"


def _whole(request: str, params: Mapping[str, Any], name: str, default: int, least: int = 0) -> int:
    value = params.get(name, default)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 16:
        raise ParamsError(f"{name} of {request} is {value!r:.40}; give a whole number from {least}.")
    return value


def answer(transfer: str, engine: str, host: str, port: int, ranks: int, request: str) -> dict[str, Any]:
    """What a prefill engine answers: the decode leg's parameters, in the shape of vLLM's own connectors."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer,
        "remote_engine_id": engine,
        "remote_request_id": request,
        "remote_block_ids": [],
        "remote_host": host,
        "remote_port": port,
        "tp_size": ranks,
    }
