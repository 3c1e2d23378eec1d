"""The sockets that clients connect to, bound before any process starts."""

import contextlib
import fcntl
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

from headrace.config.config import ServerConfig
from headrace.errors import ConfigError
from headrace.runtime.run_directory import is_alive

BACKLOG = 4096  # connections that wait to be taken


class Listeners:
    """A socket for each frontend, and where clients find them."""

    def __init__(self, sockets: list[socket.socket], url: str, path: str | None = None) -> None:
        self.sockets = sockets
        self.url = url
        self._path = path

    def close(self) -> None:
        """Stop listening and remove what a file system shows of it."""
        for listener in self.sockets:
            listener.close()
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)


def listen(config: ServerConfig) -> Listeners:
    """Bind the server's sockets.

    Raises:
        ConfigError: the address is taken or not ours, or the certificate cannot be used; the text
            names the flags.
    """
    check_certificate(config)
    if config.uds is not None:
        # A frontend takes a connection when it has time to: all share one socket.
        listener = listen_at_path(config.uds)
        return Listeners(
            [listener, *(listener.dup() for _ in range(1, config.frontend_procs))],
            f"http+unix://{config.uds}",
            config.uds,
        )
    if not config.host:
        raise ConfigError("--host is empty; 0.0.0.0 and :: are all addresses")
    # The kernel spreads connections over the sockets of one port (SO_REUSEPORT). Any server of this
    # user could join them: the first socket is alone until it listens, and no other is the first.
    first = listen_at_port(config.host, config.port)
    sockets, port = [first], first.getsockname()[1]
    if config.frontend_procs > 1:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sockets += [
            listen_at_port(config.host, port, shares=True) for _ in range(1, config.frontend_procs)
        ]
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "http" if config.ssl_certfile is None else "https"
    return Listeners(sockets, f"{scheme}://{host}:{port}")


def listen_at_port(host: str, port: int, shares: bool = False) -> socket.socket:
    """Bind a TCP socket; `shares` lets others of this user bind the same port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shares:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
        return started(listener)  # which is when another server on the port is found out
    except (OSError, TypeError, UnicodeError) as error:  # the last two: it is no name of a host
        listener.close()
        why = error.strerror if isinstance(error, OSError) else "not a host's name"
        raise ConfigError(f"cannot listen on --host {host} --port {port}: {why}") from None


def listen_at_path(path: str) -> socket.socket:
    """Bind a Unix socket; one that a dead server has left is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with only_one(Path(path).parent):
            if Path(path).is_socket() and not is_alive(path):
                os.unlink(path)
            listener.bind(path)
            return started(listener)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on --uds {path}: {error.strerror or error}") from None


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Ensure that no other server removes dead sockets in a folder: a socket that is bound but does
    not listen yet looks dead."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def started(listener: socket.socket) -> socket.socket:
    """Begin to take connections."""
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def check_certificate(config: ServerConfig) -> None:
    """Refuse a certificate that cannot be used, before a process tries to."""
    if config.ssl_certfile is None:
        if config.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile, the certificate to go with it")
        return
    files = f"--ssl-certfile {config.ssl_certfile}"
    files += f" --ssl-keyfile {config.ssl_keyfile}" if config.ssl_keyfile else ""

    def refuse_password() -> str:
        raise ConfigError(f"{files}: the key is encrypted; give one without a pass phrase")

    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, refuse_password)
    except ssl.SSLError as error:
        raise ConfigError(
            f"{files} cannot be used: {error.reason or error}; they must be a certificate and the "
            "key that goes with it, PEM"
        ) from None
    except OSError as error:
        raise ConfigError(f"{files} cannot be used: {error.strerror or error}") from None
