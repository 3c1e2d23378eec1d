"""`launch_server`: flags in, a serving ring out."""

import sys
import time
from collections.abc import Sequence

from setproctitle import setproctitle

from headrace import logs
from headrace.config import ServerConfig, from_flags
from headrace.errors import HeadraceError
from headrace.model_card import read_card
from headrace.supervisor import Supervisor, listen

BAR_WIDTH = 30


class Progress:
    """A start-up bar on standard error, for terminals only."""

    def __init__(self) -> None:
        self._shown = -1

    def show(self, share: float) -> None:
        """Draw the bar at `share`, 0 to 1."""
        filled = int(share * BAR_WIDTH)
        if filled == self._shown or not sys.stderr.isatty():
            return
        self._shown = filled
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        print(f"\rloading [{bar}] {share:4.0%}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the bar."""
        if self._shown >= 0:
            print("\r" + " " * (BAR_WIDTH + 16) + "\r", end="", file=sys.stderr, flush=True)


def greeting(url: str, model: str, seconds: float) -> str:
    """Return what a person sees when the server answers."""
    return (
        f"Headrace serves {model} on {url} (ready in {seconds:.1f} s). Try:\n\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d "
        '\'{"messages": [{"role": "user", "content": "What is the capital of France?"}], '
        '"temperature": 0}\'\n'
    )


def serve(config: ServerConfig) -> None:
    """Run a server until a signal ends it."""
    started = time.monotonic()
    card = read_card(config)
    listener = listen(config.host, config.port)
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"http://{host}:{listener.getsockname()[1]}"
    progress = Progress()

    def on_ready() -> None:
        progress.clear()
        print(greeting(url, card.name, time.monotonic() - started), file=sys.stderr, flush=True)

    Supervisor(config, card, listener).run(on_ready, progress.show)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve; exit with 1 and one line where that cannot be."""
    setproctitle("headrace: supervisor")
    logs.setup("supervisor", "info")
    try:
        serve(from_flags(argv))
    except HeadraceError as error:
        print(f"launch_server: error: {error}", file=sys.stderr)
        sys.exit(1)
