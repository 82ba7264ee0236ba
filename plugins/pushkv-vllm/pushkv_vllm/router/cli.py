"""The ``pushkv-router`` command."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from pushkv.errors import ConfigError, PushKVError
from pushkv_vllm.router.config import Mode, RouterConfig, Shape, parse_decode, parse_prefill

log = logging.getLogger("pushkv.router")

_HELP = {
    "host": "address to listen on",
    "port": "port to listen on; 0 takes a free one, which the log tells",
    "attempts": "dispatches a request gets before it fails",
    "patience": "seconds that a request waits for a healthy server",
    "max_body": "bytes that a request's body may have",
    "max_running": "requests dispatched at a time",
    "max_queue": "requests that may wait; more are answered with 429",
    "queue_limit": "seconds that a request may wait in the queue",
    "body_limit": "seconds that a request's body may take to come",
    "connect_limit": "seconds to connect to a server",
    "silence": "seconds to a stream's first and next event, and for a prefill leg",
    "answer_limit": "seconds for an answer that is not streamed",
    "client_stall": "seconds that a client may read nothing of its answer",
    "health_interval": "seconds between health checks",
    "health_limit": "seconds that a health check may take",
    "health_failures": "failed checks after which a server is down",
    "shutdown_limit": "seconds that running requests get at the end",
}


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(
        prog="pushkv-router", description="An OpenAI-compatible proxy in front of prefill and decode servers."
    )
    made.add_argument("--prefill", action="append", required=True, metavar="URL,kv=HOST:PORT[,engine=ID,tp=N,dp=N]",
                      help="a prefill server and its connector's control address; once for each")  # fmt: skip
    made.add_argument(
        "--decode", action="append", required=True, metavar="URL", help="a decode server; once for each"
    )
    made.add_argument("--mode", choices=[mode.value for mode in Mode], default=Mode.PUSH.value,
                      help="push: both legs at once; sequential: prefill first")  # fmt: skip
    shapes = [shape.value for shape in Shape]
    made.add_argument("--shape", choices=shapes, default=Shape.PUSHKV.value,
                      help="whose kv_transfer_params to send: ours, or those of vLLM's NIXL connectors")  # fmt: skip
    made.add_argument("--decode-alone", action="store_true",
                      help="let decode compute prompts itself while no prefill server is up")  # fmt: skip
    made.add_argument("--forward", action="append", default=[], metavar="HEADER",
                      help="a further header of clients that goes on to the servers")  # fmt: skip
    for field in fields(RouterConfig):
        if field.name in _HELP:
            made.add_argument("--" + field.name.replace("_", "-"), type=type(field.default), default=field.default,
                              help=f"{_HELP[field.name]} ({field.default})")  # fmt: skip
    return made


def read_config(arguments: Sequence[str] | None = None) -> RouterConfig:
    """Settings from the command line. Raises ConfigError; exits as argparse does for unknown arguments."""
    given: dict[str, Any] = vars(parser().parse_args(arguments))
    given |= {
        "prefill": tuple(parse_prefill(text) for text in given["prefill"]),
        "decode": tuple(parse_decode(text) for text in given["decode"]),
        "mode": Mode(given["mode"]),
        "shape": Shape(given["shape"]),
        "forward": tuple(given["forward"]),
    }
    return RouterConfig(**given)


async def serve(config: RouterConfig, stop: asyncio.Event) -> None:
    """Serve until ``stop`` is set, then let what runs finish, within its limit."""
    from aiohttp import web

    from pushkv_vllm.router.proxy import Router

    router = Router(config)
    # With cancellation a client that goes away ends what was begun for it.
    runner = web.AppRunner(
        router.app(), handler_cancellation=True, shutdown_timeout=config.shutdown_limit, access_log=None
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, config.host, config.port)
        await site.start()
        host, port = runner.addresses[0][:2]
        log.info("listening on http://%s:%d (%s)", host, port, config.mode.value)
        await stop.wait()
    finally:
        await runner.cleanup()


async def _serve_until_signalled(config: RouterConfig) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(config, stop)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = read_config(arguments)
        asyncio.run(_serve_until_signalled(config))
    except ImportError as error:
        print(f"pushkv-router: {error}; install pushkv-vllm[router].", file=sys.stderr)
        return 2
    except ConfigError as error:
        print(f"pushkv-router: {error}", file=sys.stderr)
        return 2
    except (PushKVError, OSError) as error:
        print(f"pushkv-router: {error}", file=sys.stderr)
        return 1
    return 0
