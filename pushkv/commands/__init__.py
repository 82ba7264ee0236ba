"""The subcommands of ``pushkv``.

Each is a module with ``add_parser(subparsers)``, which sets its ``run(args) -> int`` as the parser's
default ``run``. What a command needs beyond argparse it imports in ``run``: every parser is built at each start.
"""

COMMANDS = ("backends", "bench", "demo", "doctor", "fence", "keygen")
"""The modules, in the order of ``pushkv --help``."""
