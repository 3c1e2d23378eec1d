"""One target of `fuzz_targets.py`, for as long as one likes, with inputs bred by what they reach.

Run:    make fuzz, or python tests/support/fuzz_long.py TARGET and flags of libFuzzer
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["headrace", "jinja2"]):
    from fuzz_targets import TARGETS

name, *flags = sys.argv[1:] or [""]
if name not in TARGETS:
    sys.exit(f"name one of {', '.join(TARGETS)}")
target = TARGETS[name]
with tempfile.TemporaryDirectory(prefix="headrace-corpus-") as corpus:
    for place, seed in enumerate(target.seeds()):
        (Path(corpus) / str(place)).write_bytes(seed)
    atheris.Setup([sys.argv[0], corpus, *flags], target.run)
    atheris.Fuzz()
