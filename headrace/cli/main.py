"""`headrace COMMAND`: the console script, which dispatches to commands."""

import os
import pkgutil
import signal
import sys
from collections.abc import Callable
from functools import partial

from headrace import __version__
from headrace.errors import ConfigError, end_command
from headrace.system import standard_streams

# What each does, and where its code is: only that of the one that is asked for is loaded.
COMMANDS = {
    "serve": ("serve a model", "headrace.launch.serve:headrace_serve"),
    "chat": ("talk to a model in the terminal", "headrace.cli.chat:main"),
    "bench": ("put load on a server", "headrace.bench:main"),
    "kv": ("list, verify and prune what --kv-store keeps", "headrace.cli.kv:main"),
    "replay": ("play what --record has recorded to one process", "headrace.cli.replay:main"),
    "doctor": ("report what this machine has, and what is wrong", "headrace.cli.doctor:main"),
}
USAGE = "usage: headrace COMMAND …, or headrace --version; --help after a command\n\n" + "\n".join(
    f"  {name:8} {help}" for name, (help, _) in COMMANDS.items()
)


def main() -> None:
    """Run the command named first."""
    run_safely(partial(run, *(sys.argv[1:] or ["--help"])))


def launch_server() -> None:
    """Run the command `launch_server`, which is `headrace serve`."""
    run_safely(lambda: pkgutil.resolve_name("headrace.launch.serve:main")(sys.argv[1:]))


def run_safely(command: Callable[[], None]) -> None:
    """Run a command; end without a traceback on Ctrl-C and on a closed pipe."""
    standard_streams.open_closed()
    try:
        try:
            command()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)  # as shells have it


def run(name: str, *rest: str) -> None:
    """Run a command with the rest of its line."""
    if name in ("-V", "--version"):
        print(f"headrace {__version__}")
    elif name in ("-h", "--help"):
        print(USAGE)
    elif name in COMMANDS:
        pkgutil.resolve_name(COMMANDS[name][1])([*rest])
    else:
        end_command("headrace", ConfigError(f"no command '{name}': {', '.join(COMMANDS)}"))
