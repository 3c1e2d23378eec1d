"""On `PYTHONPATH`: Python as where torch is not installed. Importing it fails."""

import sys

for package in ("torch", "triton"):
    sys.modules[package] = None  # type: ignore[assignment]  # Python's way to say that
