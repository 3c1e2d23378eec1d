"""Frontends have uvloop, whose transports are not as asyncio's; so have their tests."""

from asyncio import AbstractEventLoop
from collections.abc import Callable

import uvloop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], AbstractEventLoop]]:
    """Return what makes event loops, by name."""
    return {"uvloop": uvloop.new_event_loop}
