"""`headrace COMMAND`: everything from one word."""

import sys
from collections.abc import Callable

from headrace import __version__, bench, launch_server

COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "serve": launch_server.main,
    "bench": bench.main,
}
USAGE = f"usage: headrace {{{','.join(COMMANDS)}}} …, or headrace --version"


def main() -> None:
    """Run the command named first."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-V", "--version"):
        print(f"headrace {__version__}")
    elif name in ("-h", "--help"):
        print(USAGE)
    elif name in COMMANDS:
        COMMANDS[name](rest)
    else:
        sys.exit(f"headrace: no command '{name}'\n{USAGE}")
