"""An embedded ring: a supervisor started by the process that uses it.

There are no frontends. The owner takes their seat (`ring_connection.py`), unless it starts a server
of its own (`local_server.py`). It writes the configuration to the supervisor's standard input. Over
a socket the supervisor reports the ring's address, that it is ready, and why it ended.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys

import msgspec
from setproctitle import setproctitle

from headrace import logs
from headrace.board.board import Board
from headrace.config.config import ServerConfig
from headrace.config.model_card import read_card
from headrace.errors import EngineDied, HeadraceError
from headrace.exit_status import ending
from headrace.launch.serve import LoadingProgress
from headrace.supervision.engine_groups import EngineGroup
from headrace.supervision.listeners import listen
from headrace.supervision.seats import seats_of
from headrace.supervision.supervisor import STOP_S, Supervisor
from headrace.system import standard_streams

MAX_REPORT_BYTES = 1 << 16
LATE_S = 5  # beyond `STOP_S`, for a supervisor that gets no processor time


class Order(msgspec.Struct):
    """The configuration to serve, and the owner's process: owner -> supervisor."""

    owner: int
    group: EngineGroup
    api_keys: list[str] | None = None  # of a ring with frontends; None is without


class Started(msgspec.Struct, tag=True):
    """The ring's run directory: supervisor -> owner. The board's descriptor comes along."""

    run_dir: str


class RingReady(msgspec.Struct, tag=True):
    """Every process has loaded its model and libraries: supervisor -> owner."""

    url: str = ""  # where the frontends listen


class RingFailed(msgspec.Struct, tag=True):
    """The ring has ended, or cannot start: supervisor -> owner, last."""

    message: str


Report = Started | RingReady | RingFailed
REPORTS: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def serve(order: Order, control: socket.socket) -> None:
    """Run a ring until a signal, or until its owner ends, for any reason."""
    owner = os.pidfd_open(order.owner)
    if os.getppid() != order.owner:  # it died before the call
        return
    config = order.group.config
    listeners = None if order.api_keys is None else listen(config)
    keys = order.api_keys or ()
    supervisor = Supervisor([order.group], listeners, keys, config.admin_api_key)
    supervisor.stop_with(owner)
    started = msgspec.msgpack.encode(Started(supervisor.run_dir))
    socket.send_fds(control, [started], [supervisor.board.fd])
    progress = LoadingProgress()

    def on_ready() -> None:
        progress.clear()
        control.send(msgspec.msgpack.encode(RingReady(listeners.url if listeners else "")))

    supervisor.run(on_ready, progress.show)


def main() -> None:
    """Run the supervisor; the socket is the descriptor in argv[1]."""
    control = socket.socket(fileno=int(sys.argv[1]))
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Order)
    setproctitle("headrace: supervisor")
    config = order.group.config
    logs.setup("supervisor", config.log_level, config.log_format)
    with contextlib.suppress(BrokenPipeError):  # an owner that is gone needs no message
        try:
            serve(order, control)
        except (HeadraceError, OSError) as error:  # OSError: the system is short of something
            control.send(msgspec.msgpack.encode(RingFailed(str(error))))


class EmbeddedServer:
    """The owner's handle of a ring: its supervisor, its run directory, its board."""

    def __init__(
        self,
        config: ServerConfig,
        api_keys: list[str] | None = None,
        log_fd: int | None = None,
    ) -> None:
        """Start a ring, which is ready once the owner has taken the frontend's seat.

        With `api_keys`, even none, it has frontends of its own, which take these. Without `log_fd`
        its log goes to standard error.

        Raises:
            ConfigError, ModelError: there is no such model, or it cannot be used.
        """
        standard_streams.open_closed()
        self._card = card = read_card(config)
        self.config = config
        self._handles_gets = api_keys is not None
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headrace.launch.embedded", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.PIPE,
                stderr=log_fd,
                start_new_session=True,  # Ctrl-C is for the owner
            )
        self.run_dir = ""
        try:
            order = msgspec.msgpack.encode(Order(os.getpid(), EngineGroup(config, card), api_keys))
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError), self.process.stdin as pipe:
                pipe.write(order)
            started = self._join()
            self.run_dir = started.run_dir
        except BaseException:
            self.stop()
            raise

    def _join(self) -> Started:
        """Wait until there is a run directory and a board, and look at the board."""
        data, fds, _, _ = socket.recv_fds(
            self.control, MAX_REPORT_BYTES, 1, socket.MSG_CMSG_CLOEXEC
        )
        started = self._read(data)
        assert isinstance(started, Started)
        takes_images = self._card.takes_images
        seats = seats_of(
            self.config,
            takes_images=takes_images,
            handles_gets=self._handles_gets,
            may_grow=self.config.admin_api_key is not None,
        )
        self.board = Board(fds[0], seats)
        os.close(fds[0])  # the memory is mapped
        return started

    def receive(self) -> Report:
        """Wait for the next report; the last one is raised.

        Raises:
            EngineDied: the ring has ended; the text says which process did, and why.
        """
        return self._read(self.control.recv(MAX_REPORT_BYTES))

    def _read(self, data: bytes) -> Report:
        if not data:
            code = self.process.wait()
            raise EngineDied(f"the supervisor {ending(code)}; the engine stops")
        report = REPORTS.decode(data)
        if isinstance(report, RingFailed):
            raise EngineDied(report.message)
        return report

    def stop(self) -> None:
        """End the ring and leave nothing of it."""
        self.process.send_signal(signal.SIGINT)  # SIGTERM would wait for open requests
        try:
            self.process.wait(STOP_S + LATE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()  # the kernel then kills its children
            self.process.wait()
        self.control.close()
        if self.run_dir:  # still there where the supervisor was killed
            shutil.rmtree(self.run_dir, ignore_errors=True)


if __name__ == "__main__":
    main()
