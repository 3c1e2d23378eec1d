"""The key of links between machines: one CURVE key pair, which all ends of a link have.

A file holds its secret half, as 40 characters of Z85. Only its owner may read it. The other half
follows from it, so a peer has both halves or none: it proves the one, and expects the other.
"""

import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile

import zmq

from headrace.errors import ConfigError

KEY_CHARACTERS = 40
OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True)
class CurveKey:
    """A key pair."""

    secret: bytes = field(repr=False)
    public: bytes


def make_key(path: str) -> None:
    """Write a new key, for its owner alone, unless there is a file.

    Raises:
        ConfigError: it cannot be written.
    """
    if os.path.lexists(path):
        return
    try:
        with NamedTemporaryFile(dir=Path(path).parent) as file:  # mode 0600
            file.write(zmq.curve_keypair()[1] + b"\n")
            file.flush()
            with suppress(FileExistsError):
                os.link(file.name, path)  # whole, or not at all
    except OSError as error:
        raise ConfigError(f"--engine-key-file {path} cannot be made: {error.strerror}") from None


def read_key(path: str) -> CurveKey:
    """Read a key.

    Raises:
        ConfigError: there is none, or others may read it.
    """
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read().strip()
    except OSError as error:
        raise ConfigError(
            f"--engine-key-file {path}: {error.strerror}; copy the file that the remote engine has "
            "made"
        ) from None
    if mode & OTHERS:
        raise ConfigError(f"--engine-key-file {path} is open to others; run chmod 600 {path}")
    try:
        return CurveKey(secret, zmq.curve_public(secret))
    except (ValueError, zmq.ZMQError):
        raise ConfigError(
            f"--engine-key-file {path} has no key: it has {len(secret)} characters, a key has "
            f"{KEY_CHARACTERS} of Z85"
        ) from None
