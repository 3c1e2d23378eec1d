"""Waits for files to become readable, whatever their descriptors: select(2) ends at 1,023."""

import selectors
from collections.abc import Sequence
from socket import socket
from typing import IO, Any


def readable(files: Sequence[IO[Any] | socket], timeout_s: float) -> list[IO[Any] | socket]:
    """Return the files that can be read, or are at their ends, as soon as there is one.

    There is none after `timeout_s`.
    """
    with selectors.DefaultSelector() as selector:
        for file in files:
            selector.register(file, selectors.EVENT_READ)
        ready = {key.fileobj for key, _ in selector.select(max(0.0, timeout_s))}
    return [file for file in files if file in ready]
