"""``pushkv doctor``: whether a push would work here, found out by making one, and what to do where it would not."""

from __future__ import annotations

import argparse
import json

from pushkv.commands.aside import words_aside


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "doctor",
        help="see whether a push would work on this machine, and what to do",
        description="Check every memory backend whose device is here and the data mover that fits it, and push "
        "between two processes. Exits with 1 if a push would not work.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--backend", action="append", default=[], metavar="NAME", help="examine this one alone; may be repeated"
    )
    parser.add_argument(
        "--transport",
        action="append",
        default=[],
        choices=("UCX", "LIBFABRIC"),
        help="examine this backend of NIXL's (default: LIBFABRIC where there is EFA, else UCX); may be repeated",
    )
    parser.add_argument("--no-push", action="store_true", help="check only, without pushing")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine, print, and give 0 if a push works. Raises PushKVError when there is nothing to examine."""
    from pushkv.doctor.examination import Doctor, try_push
    from pushkv.doctor.report import as_json, as_text, healthy
    from pushkv.plugins import registry

    trial = None if args.no_push else try_push
    with words_aside():
        found = Doctor(registry(), backends=args.backend, movers=args.transport, try_push=trial).examine()
    print(json.dumps(as_json(found), indent=2) if args.json else as_text(found))
    return 0 if healthy(found) else 1
