"""Fields of requests that are made into others', and errors that name them as the client did."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from headrace.errors import RequestError, Unsupported


@contextmanager
def as_written(names: Mapping[str, str]) -> Iterator[None]:
    """Have errors name fields as the client did; `names` has those by this server's names."""
    try:
        yield
    except RequestError as error:
        if error.param is not None and error.param in names:
            error.rename(names[error.param])
        raise


def refuse(request: msgspec.Struct, names: Iterable[str]) -> None:
    """Refuse fields that ask for what this server does not do."""
    for name in names:
        if getattr(request, name):
            raise Unsupported(f"{name}: not supported by this server", name)
