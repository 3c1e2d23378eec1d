"""A limit of memory for code that is not ours."""

import resource
from pathlib import Path
from types import TracebackType


class MemoryLimit:
    """A context in which this process may map `num_bytes` more; beyond that is a `MemoryError`."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def __enter__(self) -> None:
        _, hard = self._before = resource.getrlimit(resource.RLIMIT_AS)
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = num_pages * resource.getpagesize() + self._num_bytes
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self._before)
