"""Modules of `engine_proc/placement` that import Ray, beside a double of it."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

DOUBLE = str(Path(__file__).with_name("ray_double"))
PLACEMENT = "headrace.engine_proc.placement"


@contextmanager
def beside_double(name: str) -> Iterator[ModuleType]:
    """A module of the package, which has the double, be Ray installed or not."""
    with patch.dict(sys.modules), patch.object(sys, "path", [DOUBLE, *sys.path]):
        for one in list(sys.modules):
            if one.partition(".")[0] == "ray" or one.startswith(PLACEMENT):
                del sys.modules[one]
        yield importlib.import_module(f"{PLACEMENT}.{name}")
