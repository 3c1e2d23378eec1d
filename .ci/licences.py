"""Print docs/licences.md: the licence of everything that an install takes.

Method: the metadata of what is installed here, and npm's lock file. Of PyPI's torch for GPUs, which
is not installed everywhere, only the packages that are here are listed.
Run:    make licences
"""

import json
import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from audit import PLAIN, ROOTS, installed  # beside this file

CUDA = ("cuda-bindings", "cuda-core", "cuda-pathfinder", "nvidia-cuda-nvrtc", "triton")
LOCK = Path(__file__).parents[1] / "frontend" / "ui" / "package-lock.json"
UNUSED = ("@scarf/", "@types/")  # packages of npm of which nothing is in the page
LONGEST = 60  # characters of a licence's name; what is longer is its text
HEAD = """# Licences

Headrace is under the Apache License 2.0. `make licences` makes this page of the metadata of what is
installed.

## What a plain install takes

"""
WITH_EXTRAS = """
## With extras

`headrace[modules]`, `[images]`, `[mistral]`, `[gpu]`, `[otel]` and `[ray]` take these, too.
"""
IN_PAGE = """
## In the web page

`frontend/ui/dist` has parts of these packages of npm. `/docs/licences.txt` has their texts.

"""
ON_GPUS = """
## On GPUs

`headrace[gpu]` and PyPI's torch for Linux take these, too. That torch also takes `cuda-toolkit`
and more `nvidia-*` packages, which are under licences of NVIDIA's.

"""


def licence_of(package: Distribution) -> str:
    """Return a package's licence as its metadata has it; "" where that says nothing."""
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        return expression
    licence = metadata.get("License") or ""
    if licence and "\n" not in licence and len(licence) <= LONGEST:
        return licence
    classifiers = metadata.get_all("Classifier") or []
    found = [c.rpartition(" :: ")[2] for c in classifiers if c.startswith("License ::")]
    return ", ".join(found) or title_of(package)


def title_of(package: Distribution) -> str:
    """Return the first lines of a package's licence file, where its metadata does not name it."""
    files = [file for file in package.files or [] if file.name.upper().startswith("LICEN")]
    lines = [line.strip() for file in files[:1] for line in file.read_text().splitlines()]
    title = " ".join(line for line in lines if line)
    return title[:LONGEST].rpartition(" ")[0]


def page_of(package: Distribution) -> str:
    """Return where a package is at home; "" where its metadata says nothing."""
    metadata = package.metadata
    urls = [entry.partition(",") for entry in metadata.get_all("Project-URL") or []]
    named = {re.sub(r"\W", "", label).lower(): url.strip() for label, _, url in urls}
    labels = ("source", "sourcecode", "repository", "github", "homepage", "home", "code")
    found = [named[label] for label in labels if label in named]
    return found[0] if found else metadata.get("Home-page") or next(iter(named.values()), "")


def table(names: Iterable[str]) -> str:
    """Return the packages that are installed, as a table."""
    lines = ["| package | licence | |", "| --- | --- | --- |"]
    for name in names:
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        lines.append(f"| {name} | {licence_of(package)} | {page_of(package)} |")
    return "\n".join(lines) + "\n"


def npm_table() -> str:
    """Return the packages of npm that the web page may take, as a table."""
    lines = ["| package | licence | |", "| --- | --- | --- |"]
    for path, package in json.loads(LOCK.read_text())["packages"].items():
        name = path.removeprefix("node_modules/")
        if name and not package.get("dev") and not name.startswith(UNUSED):
            lines.append(
                f"| {name} | {package['license']} | https://www.npmjs.com/package/{name} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the page."""
    plain = installed(PLAIN)
    extras = [name for name in installed(ROOTS) if name not in CUDA and name[:7] != "nvidia-"]
    extras = [name for name in extras if name not in plain]
    tables = HEAD + table(plain) + WITH_EXTRAS + table(extras) + ON_GPUS + table(CUDA)
    print(tables + IN_PAGE + npm_table(), end="")


if __name__ == "__main__":
    main()
