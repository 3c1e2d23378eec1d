"""The C++ core, by ctypes: every call releases the GIL, and no Python or torch ABI is involved."""

import ctypes
import functools
import importlib.util
from collections.abc import Iterable

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


def check_structs(core: ctypes.CDLL, name: str, structs: Iterable[type[ctypes.Structure]]) -> None:
    """Check that the core has the structs that are handed to it.

    Args:
        name: of the function that returns how many bytes they have together.

    Raises:
        HeadraceError: it was built from another version.
    """
    if not hasattr(core, name) or core[name]() != sum(map(ctypes.sizeof, structs)):
        raise HeadraceError("headrace._core is of another version; build it with `make install`")


def best_kernels() -> str:
    """Return which kernels run here, as "avx512 with amx", "avx2", "neon with i8mm and bf16".

    "portable" is none of these. Where they have the same name, they compute the same bits.

    Raises:
        HeadraceError: none have been built.
    """
    find = load_core().headrace_cpu_kernels
    find.restype = ctypes.c_char_p
    name: bytes = find()
    return name.decode()
