"""The C++ core, by ctypes: every call releases the GIL, and no Python or torch ABI is involved."""

import ctypes
import functools
import importlib.util

from headrace.errors import HeadraceError


@functools.cache
def load_core() -> ctypes.CDLL:
    """Load the extension that `setup.py` builds from `csrc/`.

    Raises:
        HeadraceError: it has not been built.
    """
    spec = importlib.util.find_spec("headrace._core")
    if spec is None or spec.origin is None:
        raise HeadraceError("headrace._core is missing; build it with `make install`")
    return ctypes.CDLL(spec.origin)
