"""`launch_server`: flags in, a serving ring out."""

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

from setproctitle import setproctitle

from headrace import logs
from headrace.config.api_keys import read_admin_key, read_api_keys
from headrace.config.config import ServerConfig
from headrace.config.flags import configs_from_flags, server_parser
from headrace.config.model_card import read_card
from headrace.errors import HeadraceError
from headrace.exit_status import ExitStatus
from headrace.runtime.process import leave
from headrace.supervision.engine_groups import EngineGroup
from headrace.supervision.listeners import listen
from headrace.supervision.supervisor import Supervisor
from headrace.system import standard_streams
from headrace.system.cpu_share import num_nodes
from headrace.system.machine import has_gpus

BAR_WIDTH = 30
LOG_INTERVAL_S = 5.0

log = logging.getLogger(__name__)


class LoadingProgress:
    """A start-up bar on a terminal; elsewhere a line in the log, at most every 5 seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_at = clock()
        self._shown = -1

    def show(self, share: float) -> None:
        """Draw the bar at `share`, 0 to 1, or log it when it is time."""
        if not sys.stderr.isatty():
            if 0 < share < 1 and self._clock() - self._logged_at >= LOG_INTERVAL_S:
                self._logged_at = self._clock()
                log.info("loading weights: %d %%", 100 * share)
            return
        filled = int(share * BAR_WIDTH)
        if filled == self._shown:
            return
        self._shown = filled
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        print(f"\rloading [{bar}] {share:4.0%}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the bar."""
        if self._shown >= 0:
            print("\r" + " " * (BAR_WIDTH + 16) + "\r", end="", file=sys.stderr, flush=True)


def greeting(url: str, model: str, seconds: float, has_keys: bool, has_ui: bool) -> str:
    """Return what a person sees when the server answers."""
    path = url.removeprefix("http+unix://")
    where = url if path == url else f"--unix-socket {path} http://localhost"
    key = " -H 'Authorization: Bearer KEY'" if has_keys else ""
    page = f"\nor open {url} in a browser.\n" if has_ui and path == url else ""
    return (
        f"Headrace serves {model} on {url} (ready in {seconds:.1f} s). Try:\n\n"
        f"  curl {where}/v1/chat/completions -H 'Content-Type: application/json'{key} -d "
        '\'{"messages": [{"role": "user", "content": "What is the capital of France?"}], '
        f'"temperature": 0}}\'\n{page}'
    )


def serve(configs: Sequence[ServerConfig]) -> None:
    """Run a server of some models until a signal ends it; its own flags are the first one's."""
    started = time.monotonic()
    groups = [EngineGroup(config, read_card(config)) for config in configs]
    config, names = configs[0], ", ".join(group.card.name for group in groups)
    api_keys = read_api_keys(config, os.environ)
    admin_key = read_admin_key(config, os.environ, api_keys)
    if config.engine_listen is not None:
        serve_engine(groups)
        return
    listeners = listen(config)
    progress = LoadingProgress()

    def on_ready() -> None:
        progress.clear()
        seconds = time.monotonic() - started
        hello = greeting(listeners.url, names, seconds, bool(api_keys), config.ui)
        if config.log_format == "json":
            log.info("%s", hello.partition(". Try:")[0])
            return
        with contextlib.suppress(OSError):  # a log that cannot be written to ends nothing
            print(hello, file=sys.stderr, flush=True)

    Supervisor(groups, listeners, api_keys, admin_key).run(on_ready, progress.show)


def serve_engine(groups: Sequence[EngineGroup]) -> None:
    """Run an engine for a server on another machine, until a signal ends it."""
    progress = LoadingProgress()
    Supervisor(groups).run(progress.clear, progress.show)


def headrace_serve(argv: Sequence[str]) -> None:
    """Run `headrace serve`."""
    main(argv, "headrace serve")


def main(argv: Sequence[str] | None = None, prog: str = "launch_server") -> None:
    """Serve; exit with an `ExitStatus`, and one line where that cannot be."""
    standard_streams.open_closed()
    signal.signal(signal.SIGTERM, leave)  # PID 1 of a container would not even get it
    setproctitle("headrace: supervisor")
    logs.setup("supervisor", "info")
    log_format = "text"
    try:
        argv = sys.argv[1:] if argv is None else argv
        configs = configs_from_flags(argv, has_gpus(), server_parser(prog), num_nodes())
        config = configs[0]
        if config.log_format != log_format:
            log_format = config.log_format
            logs.setup("supervisor", "info", log_format)
        serve(configs)
    except (HeadraceError, OSError) as error:  # OSError: the system is short of something
        why = " ".join(str(error).splitlines())  # a path may have several
        if log_format == "json":
            log.error("%s", why)
        else:
            print(f"{prog}: error: {why}", file=sys.stderr)
        short_of = ExitStatus.SHORT_OF
        sys.exit(error.exit_status if isinstance(error, HeadraceError) else short_of)
    except KeyboardInterrupt:  # before the supervisor takes signals
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
