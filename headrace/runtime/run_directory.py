"""The run directory of a server, for its sockets: mode 0700, removed with the server."""

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

from headrace.errors import ConfigError

PREFIX = "headrace-"
LONGEST_SOCKET = "detokenizer-255.sock"
YOUNG_S = 60.0
MAX_SOCKET_PATH = 107  # bytes, of any Unix socket


class RunDirectory:
    """A new run directory, among those of other servers."""

    def __init__(self) -> None:
        """Make it.

        Raises:
            ConfigError: there is no place for it; the text names TMPDIR, which says where to look.
        """
        try:
            self.path = tempfile.mkdtemp(prefix=PREFIX)
        except OSError as error:
            raise ConfigError(
                f"no directory for sockets can be made: {error.strerror or error}; "
                "set TMPDIR to a folder that can be written to"
            ) from None
        # Held as long as this process lives, so that no other server takes it for abandoned.
        # One that looks whether it is held has it for a moment.
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        parent = os.path.dirname(self.path)
        if len(os.fsencode(os.path.join(self.path, LONGEST_SOCKET))) > MAX_SOCKET_PATH:
            self.remove()
            raise ConfigError(
                f"{parent} is too long a name for a folder of sockets; set TMPDIR to another"
            )
        sweep(Path(parent))

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep(parent: Path) -> None:
    """Remove run directories that killed servers of this user have left."""
    for directory in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # its server may remove it meanwhile
            if (
                directory.is_dir()
                and directory.stat().st_uid == os.getuid()
                and is_abandoned(directory)
            ):
                shutil.rmtree(directory, ignore_errors=True)


def is_abandoned(directory: Path) -> bool:
    """Whether no server holds a run directory, and no process listens in it.

    An empty one may just have been made, before its server holds it.
    """
    if is_held(directory):
        return False
    files = list(directory.iterdir())
    if not files:
        return time.time() - directory.stat().st_mtime > YOUNG_S
    sockets = list(directory.glob("*.sock"))
    return bool(sockets) and not any(map(is_alive, sockets))


def is_held(directory: Path) -> bool:
    """Whether the supervisor that made a directory lives."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def is_alive(file: Path | str) -> bool:
    """Whether a process listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(file))
        except OSError:
            return False
        return True
