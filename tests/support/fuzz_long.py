"""Run one target of `fuzz_targets.py` for any time, with coverage-guided inputs.

Those that reach something new are kept in build/fuzz, where the next run begins; so are those of
which something dies.

Run:    make fuzz, or python tests/support/fuzz_long.py TARGET and flags of libFuzzer
"""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["headrace", "jinja2"]):
    from fuzz_targets import TARGETS

name, *flags = sys.argv[1:] or [""]
if name not in TARGETS:
    sys.exit(f"name one of {', '.join(TARGETS)}")
target = TARGETS[name]
corpus = Path("build/fuzz") / name
corpus.mkdir(parents=True, exist_ok=True)
for place, seed in enumerate(target.seeds()):
    (corpus / f"seed-{place}").write_bytes(seed)
# Seeds stay, for those whose subject is in C, and tells nothing of what is reached in it.
ours = ["-keep_seed=1", f"-artifact_prefix={corpus}-"]
atheris.Setup([sys.argv[0], str(corpus), *ours, *flags], target.run)
atheris.Fuzz()
