"""The ``kv_transfer_params`` of the two legs, for our connector and for vLLM's own.

Ours understands, on both legs, ``transfer_id`` (one dispatch, exactly), ``n`` (how many siblings decode will make of
it) and ``attempt`` (which dispatch of the same request this is, from 0); on the decode leg also where the prefill
server's connector is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pushkv_vllm.router.config import PrefillServer, Shape


@dataclass(frozen=True)
class Dispatch:
    """One dispatch of a request to a pair of servers.

    ``id`` is fresh, and what both legs are sent as ``X-Request-Id``; ``request`` is what vLLM makes of that.
    """

    id: str
    request: str
    attempt: int
    n: int
    prefill: PrefillServer
    rank: int


def prefill_params(shape: Shape, dispatch: Dispatch) -> dict[str, Any]:
    """What the prefill leg is sent; also when it goes first and answers what decode is to be sent."""
    plain: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
    if shape is Shape.STOCK:
        unknown = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
        return plain | dict.fromkeys(unknown)
    return plain | {"transfer_id": dispatch.id, "attempt": dispatch.attempt, "n": dispatch.n}


def decode_params(shape: Shape, dispatch: Dispatch) -> dict[str, Any]:
    """What the decode leg is sent when both go at once."""
    server = dispatch.prefill
    params: dict[str, Any] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": server.engine,
        "remote_host": server.kv_host,
        "remote_port": server.kv_port,
        "tp_size": server.tp,
    }
    if shape is Shape.STOCK:
        # It matches the prefill request by the id that vLLM makes of X-Request-Id. With data parallel ranks vLLM
        # gives each a port and an engine id of its own.
        return params | {
            "remote_request_id": dispatch.request,
            "remote_block_ids": [],
            "remote_port": server.kv_port + dispatch.rank,
            "remote_engine_id": server.engine if server.dp == 1 else f"{server.engine}_dp{dispatch.rank}",
        }
    return params | {
        "transfer_id": dispatch.id,
        "attempt": dispatch.attempt,
        "n": dispatch.n,
        "remote_dp_rank": dispatch.rank,
    }
