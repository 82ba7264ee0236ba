"""The command ``pushkv``, also ``python -m pushkv``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from pushkv.commands import COMMANDS
from pushkv.errors import PushKVError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 1 for an error of PushKV, told in one line on standard error.

    As argparse does, raises SystemExit for ``--help``, ``--version`` and wrong usage.
    """
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except PushKVError as error:
        print(f"pushkv: error: {error}", file=sys.stderr)
        return 1


def build_parser() -> argparse.ArgumentParser:
    """The parser with every command of :data:`pushkv.commands.COMMANDS`."""
    parser = argparse.ArgumentParser(prog="pushkv", description="Push-mode KV cache transfer over NIXL.")
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"pushkv.commands.{name}").add_parser(subparsers)
    return parser


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from pushkv.discovery import own_distribution

        print(" ".join(own_distribution()))
        parser.exit()
