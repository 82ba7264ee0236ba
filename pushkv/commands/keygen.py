"""``pushkv keygen``: make a cluster key, or put a new one beside the old."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pushkv.errors import ConfigError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "keygen",
        help="make a cluster key for the control plane",
        description="Make a cluster key: print it, or write it to a file that only its owner can read.",
    )
    parser.add_argument("file", nargs="?", help="the file to write; without it the key is printed")
    parser.add_argument(
        "--rotate",
        action="store_true",
        help="add a second key below the one in the file: dialled with and accepted, not yet listened with",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print or write a key. Raises ConfigError where a file is in the way."""
    from pushkv.runtime.keys import load_keys, new_key

    key = new_key()
    if not args.file:
        print(key)
        return 0
    path = Path(args.file)
    if args.rotate:
        known = load_keys(str(path))
        if len(known) > 1:
            raise ConfigError(f"{path} holds two keys already; remove the old one from every host first.")
        path.write_text(path.read_text().rstrip("\n") + f"\n{key}\n")
        return 0
    _create(path, key)
    return 0


def _create(path: Path, key: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path} exists; choose another file, or add a second key with --rotate.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another file.") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{key}\n")
