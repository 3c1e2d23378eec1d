"""Fields of requests that are made into others', and errors that name them as the client did."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

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


def refuse(request: msgspec.Struct, names: Iterable[str]) -> None:
    """Refuse fields for features that this server lacks."""
    for name in names:
        if getattr(request, name):
            raise Unsupported(f"{name}: not supported by this server", name)
