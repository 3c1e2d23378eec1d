"""Fields of requests that are made into others', and errors that name them as the client did."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from typing import Any

import msgspec

from headrace.errors import RequestError, Unsupported

INDEX = re.compile(r"\[\d+\]")


@contextmanager
def as_written(names: Mapping[str, str]) -> Iterator[None]:
    """Have errors name fields as the client did.

    `names` has those by this server's names. `[]` stands for any index, in both.
    """
    try:
        yield
    except RequestError as error:
        param = error.param or ""
        name = names.get(param) or names.get(INDEX.sub("[]", param))
        if name is not None:
            indices = iter(INDEX.findall(param))
            error.rename(re.sub(r"\[\]", lambda _: next(indices), name))
        raise


@cache
def values_of(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function for the values of fields, two at least."""
    return attrgetter(*names)


def refuse(request: msgspec.Struct, names: tuple[str, ...]) -> None:
    """Refuse fields for features that this server lacks; `names` has two at least."""
    if not any(values_of(names)(request)):
        return
    for name in names:
        if getattr(request, name):
            raise Unsupported(f"{name}: not supported by this server", name)
