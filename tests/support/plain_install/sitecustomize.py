"""On `PYTHONPATH`: Python as where no extra of headrace is installed. Importing one fails."""

import sys

for package in ("PIL", "torch", "transformers", "triton"):
    sys.modules[package] = None  # type: ignore[assignment]  # Python's way to say that
