"""``pushkv fence``: have an endpoint rebuild its agent, for proof about the memory it has in quarantine."""

from __future__ import annotations

import argparse
import sys


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "fence",
        help="have an endpoint rebuild its agent for proof about quarantined memory",
        description="Have an endpoint rebuild its agent: what is open there ends, and what lost peers of other hosts "
        "or ended processes of its own could still write is out of reach. Exits with 1 if something stays in "
        "quarantine.",
    )
    parser.add_argument("peer", help="the endpoint's address (its `address`, also in its message about quarantine)")
    parser.add_argument("--key-file", default="", help="the cluster key's file; by default the environment's key")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds the endpoint may take (10)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask, wait and say what came of it. Raises HandshakeError where nobody answers."""
    from pushkv.runtime.operator import ask_to_fence

    fenced = ask_to_fence(args.peer, args.timeout, args.key_file)
    print(fenced.detail, file=sys.stdout if fenced.clear else sys.stderr)
    return 0 if fenced.clear else 1
