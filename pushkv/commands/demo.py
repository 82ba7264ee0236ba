"""``pushkv demo``: prefill in one process, decode in another, the KV pushed between them, the tokens compared."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

from pushkv.commands.aside import words_aside

if TYPE_CHECKING:
    from pushkv.demo.settings import DemoSettings, Layout

INTERRUPTED = 130


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "demo",
        help="push the KV of a small model from a prefill to a decode process",
        description="Prefill and decode as processes of this machine: a small model's KV is pushed over NIXL, and "
        "the tokens are compared with those of one process alone. Exits with 1 unless all are equal.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace of all processes, for Perfetto")
    parser.add_argument("--requests", type=int, metavar="N", help="concurrent requests (default: 16)")
    parser.add_argument("--seed", type=int, metavar="S", help="draws the prompts")
    parser.add_argument("--longest", type=int, metavar="N", help="tokens of the longest prompt (default: 512)")
    parser.add_argument("--new-tokens", type=int, metavar="N", help="tokens to generate a request (default: 32)")
    parser.add_argument("--chunk", type=int, metavar="N", help="tokens computed at a time in prefill (default: 128)")
    parser.add_argument("--no-raw", action="store_true", help="leave out the measurement of NIXL alone")
    parser.add_argument(
        "--landing",
        choices=("direct", "landing", "auto"),
        default="direct",
        help="how the KV lands (default: direct)",
    )
    parser.add_argument(
        "--stream",
        choices=("auto", "request", "chunk", "layer"),
        default="chunk",
        help="what leaves while a prompt is computed (default: chunk)",
    )
    for side in ("prefill", "decode"):
        parser.add_argument(f"--{side}-tp", type=int, metavar="N", help=f"{side} ranks (default: 1)")
        parser.add_argument(f"--{side}-block", type=int, metavar="N", help=f"{side} tokens a block (default: 16)")
        parser.add_argument(
            f"--{side}-order", metavar="AXES", help=f"{side} axes: block-outer (default), HND, NHD, or six letters"
        )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo and show what came of it; 0 if all went well. Raises PushKVError where it cannot run."""
    from pushkv.demo.environment import ONE_THREAD, environment

    with environment(ONE_THREAD):  # before anything imports numpy
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from pushkv.demo.report import Judgement
    from pushkv.demo.router import Watch, run_demo
    from pushkv.demo.tables import Progress
    from pushkv.trace import write_chrome

    settings = _settings(args)
    if args.trace:
        write_chrome(args.trace, [])  # what cannot be written is better told now
    progress = Progress("requests done", settings.workload.count)
    watch = Watch(lambda line: print(f"pushkv demo: {line}", file=sys.stderr), progress.advance)
    try:
        with words_aside() if args.json else nullcontext():
            judgement = Judgement(run_demo(settings, watch))
    except KeyboardInterrupt:
        print("pushkv demo: interrupted; its processes are ended", file=sys.stderr)
        return INTERRUPTED
    if args.trace:
        write_chrome(args.trace, [report.recording for report in judgement.run.reports.values()])
    print(json.dumps(judgement.as_json()) if args.json else judgement.as_table())
    return 1 if judgement.troubles else 0


def _settings(args: argparse.Namespace) -> DemoSettings:
    from pushkv.demo.settings import DemoSettings
    from pushkv.demo.workload import Workload

    asked = {"count": args.requests, "seed": args.seed, "longest": args.longest, "new_tokens": args.new_tokens}
    given = {name: value for name, value in asked.items() if value is not None}
    if args.longest is not None:
        given["shortest"] = min(args.longest, Workload.shortest)
    return DemoSettings(
        workload=Workload(**given),
        prefill=_layout(args, "prefill"),
        decode=_layout(args, "decode"),
        chunk=DemoSettings.chunk if args.chunk is None else args.chunk,
        landing=args.landing,
        stream=args.stream,
        raw_repeats=0 if args.no_raw else DemoSettings.raw_repeats,
    )


def _layout(args: argparse.Namespace, side: str) -> Layout:
    from pushkv.demo.settings import Layout

    asked = {"tp": f"{side}_tp", "block_size": f"{side}_block", "order": f"{side}_order"}
    given = {name: getattr(args, option) for name, option in asked.items()}
    return Layout(**{name: value for name, value in given.items() if value is not None})
