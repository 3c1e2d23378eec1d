"""Make a release of the commit that is checked out: check, test, build, try; print how to publish.

Method: the tree is clean. The changelog's first heading has the version and a date, and the tag of
the version points here. What builds and tries the wheel for arm64 is installed. Then `.ci/run`
tests and builds what `dist` holds. Nothing is uploaded or pushed.
Run:    make release
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Container, Iterator
from pathlib import Path

from headrace import __version__

ROOT = Path(__file__).parents[1]
FOR_ARM64 = {  # programs, and Debian's packages of them
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "qemu-aarch64": "qemu-user",
}
HEADING = re.compile(r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$")


def git(*args: str) -> str:
    """Return what git says of the tree."""
    command = ["git", "-C", str(ROOT), *args]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def problems(
    version: str, status: str, heading: str, tags: list[str], programs: Container[str]
) -> Iterator[str]:
    """Yield what keeps a commit from being a release, each with its remedy.

    Args:
        status: of `git status --porcelain`.
        heading: the changelog's first line of a version.
        tags: those that point at the commit.
        programs: those that are installed, of `FOR_ARM64`.
    """
    if status:
        yield f"files differ from the commit; commit or stash them:\n{status.rstrip()}"
    found = HEADING.match(heading)
    if found is None or found[1] != version:
        yield f"CHANGELOG.md begins with {heading!r}; write '## {version} (YYYY-MM-DD)'"
    if f"v{version}" not in tags:
        yield f"no tag v{version} points here; `git tag -s v{version} -m 'Headrace {version}'`"
    for program, package in FOR_ARM64.items():
        if program not in programs:
            yield f"no {program}, which the wheel for arm64 takes; `apt-get install {package}`"


def unexpected(version: str, names: list[str]) -> Iterator[str]:
    """Yield what is wrong with the files of `dist`."""
    for pattern in (
        rf"headrace-{re.escape(version)}\.tar\.gz",
        rf"headrace-{re.escape(version)}-cp311-abi3-.*manylinux.*_x86_64\.whl",
        rf"headrace-{re.escape(version)}-cp311-abi3-.*manylinux.*_aarch64\.whl",
        r"headrace_demo-[\d.]+-py3-none-any\.whl",
    ):
        if not any(re.fullmatch(pattern, name) for name in names):
            yield f"dist has no file {pattern}; it has {', '.join(names) or 'none'}"


def main() -> None:
    """Release; exit with a line for each problem."""
    headings = re.findall(r"^## .*$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    tags = git("tag", "--points-at", "HEAD").split()
    programs = set(filter(shutil.which, FOR_ARM64))
    status = git("status", "--porcelain")
    found = list(problems(__version__, status, headings[0], tags, programs))
    if found:
        sys.exit("\n".join(f"release: {line}" for line in found))
    subprocess.run([ROOT / ".ci/run"], check=True)
    files = sorted(file.name for file in (ROOT / "dist").iterdir())
    found = list(unexpected(__version__, files))
    if found:
        sys.exit("\n".join(f"release: {line}" for line in found))
    print(f"Headrace {__version__} is tested and in dist/. To publish:\n")
    print(f"    git push origin v{__version__}")
    print("    twine upload dist/*")


if __name__ == "__main__":
    main()
