"""Why a Ray cluster cannot be joined, or an actor has ended: one line each."""

import re
import socket

from headrace.errors import ConfigError

CONNECT_S = 5.0
NO_CODE = re.compile(r"No module named '(headrace[\w.]*)'")
CAUSE = re.compile(r"The actor (?:is dead|died) because (?:of )?(.*?)(?:\. Worker exit|\.?\n|$)")


def check_reachable(where: str, name: str) -> None:
    """Refuse an address of a cluster at which nothing listens: Ray tries for minutes.

    Args:
        name: of the flag or variable that has it.

    Raises:
        ConfigError: it is such a one, or of no cluster that this machine is a node of. Others than
            HOST:PORT are left to Ray.
    """
    if where == "local" or where.startswith("ray://"):
        raise ConfigError(
            f"{name} {where} is of no cluster that this machine is a node of; set HOST:PORT of "
            "its head"
        )
    host, _, port = where.rpartition(":")
    if not port.isdecimal() or "//" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        raise ConfigError(
            f"{name} {where} cannot be reached: {error}; run `ray start --head` there"
        ) from None


def why_lost(text: str, node: str) -> str:
    """Return why an actor has ended on a node, in one line, from Ray's text."""
    lack = NO_CODE.search(text)
    if lack is not None:
        return f"cannot run on {node}: no module {lack[1]}; install the server's headrace there"
    cause = CAUSE.search(text)
    return f"is lost with its actor on {node}: {plain(cause[1] if cause else text)}"


def plain(what: object) -> str:
    """Return a text in one line."""
    return " ".join(str(what).split())
