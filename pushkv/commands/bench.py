"""``pushkv bench``: what a push costs on this machine, beside NIXL alone and beside a pull."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pushkv.commands.aside import words_aside
from pushkv.errors import BenchError, ConfigError

INTERRUPTED = 130


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's parser, with one of its own for each measurement."""
    parser = subparsers.add_parser(
        "bench",
        help="measure descriptors, handover or serving on this machine, and draw what was measured",
        description="Measure on this machine, between two processes over real NIXL. Figures of one run compare with "
        "each other; those of two runs do not.",
    )
    kinds = parser.add_subparsers(title="measurements", dest="bench", metavar="WHAT", required=True)
    _add_descriptors(_kind(kinds, "descriptors", "time against the shape of blocks: raw NIXL, direct, landing, auto"))
    _add_handover(_kind(kinds, "handover", "latency against size, how soon offers are seen, what idling costs"))
    _add_serve(_kind(kinds, "serve", "TTFT and TPOT against load: no transfer, pull, push, streaming push"))
    draw = kinds.add_parser("draw", help="draw the figures of results that --json has printed")
    draw.add_argument("results", nargs="+", type=Path, metavar="FILE", help="a file with one result")
    draw.add_argument("--plot", type=Path, required=True, metavar="DIR", help="where the figures go")
    draw.set_defaults(run=run_draw)


def _kind(kinds: Any, name: str, told: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(name, help=told, description=told)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw the figures into this folder, PNG and SVG")
    parser.add_argument("--tls", help="UCX_TLS for both processes, as tcp; by default what UCX chooses")
    parser.set_defaults(run=run)
    return parser


def _add_descriptors(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pieces", type=_numbers, metavar="BYTES,…", help="bytes a piece (512 to 4194304)")
    parser.add_argument("--regions", type=int, metavar="N", help="layers, at most (128)")
    parser.add_argument("--count", type=int, metavar="N", help="pieces a region (as many as make 64 MiB in all)")
    parser.add_argument("--repeats", type=int, metavar="N", help="rounds, of which the median counts (5)")
    parser.add_argument("--slot", type=int, metavar="BYTES", help="a landing slot, of 16 (16777216)")


def _add_handover(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=_numbers, metavar="BYTES,…", help="bytes a request (65536,1048576,16777216)")
    parser.add_argument("--repeats", type=int, metavar="N", help="requests a size (30)")
    parser.add_argument("--idle-seconds", type=float, metavar="S", help="for how long idling is watched (5)")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=_numbers, metavar="TOKENS,…", help="tokens a prompt (1024,4096,16384)")
    parser.add_argument("--rates", type=_floats, metavar="QPS,…", help="requests a second (1,2,4,8)")
    parser.add_argument(
        "--modes",
        type=_words,
        metavar="MODE,…",
        help="none, pull, push and stream by default; pull-default has NIXL's agent as its Python API makes it",
    )
    parser.add_argument("--seconds", type=float, metavar="S", help="for how long requests come in a cell (8)")
    parser.add_argument("--new-tokens", type=int, metavar="N", help="tokens generated a request (32)")
    parser.add_argument("--prefill-us", type=float, metavar="US", help="what prefill takes for a token (5)")
    parser.add_argument("--chunk", type=int, metavar="TOKENS", help="tokens of a prefill step (2048)")
    parser.add_argument("--decode-ms", type=float, metavar="MS", help="a decode step (10)")
    parser.add_argument("--held", type=float, metavar="SHARE", help="of each step is computed with the GIL (0.5)")
    parser.add_argument("--token-bytes", type=int, metavar="BYTES", help="KV of a token (4096)")
    parser.add_argument(
        "--regions", type=int, metavar="N", help="layers that are regions of their own (1: blocks outermost)"
    )
    parser.add_argument("--landing", choices=("direct", "landing", "auto"), help="the way that pushes take (direct)")
    parser.add_argument("--seed", type=int, metavar="S", help="draws the arrivals")


def run(args: argparse.Namespace) -> int:
    """Measure, print, and draw if asked to. Raises BenchError, ConfigError and TransportUnavailable."""
    from pushkv.bench import plots
    from pushkv.demo.environment import ONE_THREAD, environment

    if args.plot is not None:
        plots.require_matplotlib()
    with environment(ONE_THREAD | ({"UCX_TLS": args.tls} if args.tls else {})):
        try:
            with words_aside() if args.json else nullcontext():
                result = _measured(args)
        except KeyboardInterrupt:
            print("pushkv bench: interrupted; its processes are ended", file=sys.stderr)
            return INTERRUPTED
    if args.json:
        print(json.dumps(result))
    if args.plot is not None:
        _draw(result, args.plot)
    return 0


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    """The result, with where and when; its rows are printed as they come, unless JSON is asked for."""
    from pushkv.bench.report import closing_lines, line_of, surroundings

    where = surroundings() | {"tls": args.tls or "UCX's choice"}

    def told(row: dict[str, Any]) -> None:
        print(line_of(args.bench, row), file=sys.stderr if args.json else sys.stdout, flush=True)

    result = _measurement(args)(told) | {"where": where}
    if not args.json:
        print("\n".join(closing_lines(result)))
    return result


def _measurement(args: argparse.Namespace) -> Callable[[Callable[[dict[str, Any]], None]], dict[str, Any]]:
    """The measurement with its settings; what was not given has its default."""
    from dataclasses import fields

    from pushkv.bench import descriptors, handover, serve
    from pushkv.bench.workload import ServeSettings

    kinds: dict[str, tuple[Any, type[Any]]] = {
        "descriptors": (descriptors.measure, descriptors.DescriptorSettings),
        "handover": (handover.measure, handover.HandoverSettings),
        "serve": (serve.measure, ServeSettings),
    }
    measure, settings = kinds[args.bench]
    given = {field.name: getattr(args, field.name, None) for field in fields(settings)}
    if (modes := given.get("modes")) is not None:
        given["modes"] = tuple(_mode(name) for name in modes)
    chosen = settings(**{name: value for name, value in given.items() if value is not None})
    return lambda told: measure(chosen, told)


def _mode(name: str) -> Any:
    from pushkv.bench.workload import Mode

    try:
        return Mode(name)
    except ValueError:
        known = ", ".join(mode.value for mode in Mode)
        raise ConfigError(f"There is no mode {name!r}; give some of {known}.") from None


def run_draw(args: argparse.Namespace) -> int:
    """Draw what earlier runs have printed. Raises BenchError."""
    for path in args.results:
        try:
            result = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise BenchError(f"{path} holds no result: {error}; give a file of pushkv bench --json.") from error
        if not isinstance(result, dict):
            raise BenchError(
                f"{path} holds no result but a {type(result).__name__}; give a file of pushkv bench --json."
            )
        _draw(result, args.plot)
    return 0


def _draw(result: dict[str, Any], folder: Path) -> None:
    from pushkv.bench import plots

    for path in plots.draw(result, folder):
        print(path, file=sys.stderr)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in _words(text))


def _floats(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in _words(text))
