"""What keeps a commit from being a release."""

import importlib.util
import sys
from pathlib import Path

import pytest

CI = Path(__file__).parents[2] / ".ci"
spec = importlib.util.spec_from_file_location("release", CI / "release.py")
assert spec is not None
assert spec.loader is not None
release = sys.modules["release"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(release)

PROGRAMS = ["aarch64-linux-gnu-g++", "qemu-aarch64"]
DATED = "## 1.2.3 (2026-11-23)"
FILES = [
    "headrace-1.2.3.tar.gz",
    "headrace-1.2.3-cp311-abi3-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl",
    "headrace-1.2.3-cp311-abi3-manylinux_2_27_aarch64.whl",
    "headrace_demo-1.0.0-py3-none-any.whl",
]


def test_a_clean_dated_tagged_commit_is_a_release() -> None:
    assert not list(release.problems("1.2.3", "", DATED, ["v1.2.3", "latest"], PROGRAMS))


@pytest.mark.parametrize(
    ("status", "heading", "tags", "says"),
    [
        (" M setup.py\n", DATED, ["v1.2.3"], "files differ from the commit"),
        ("", "## 1.2.3 (unreleased)", ["v1.2.3"], "write '## 1.2.3 (YYYY-MM-DD)'"),
        ("", "## 1.2.2 (2026-11-23)", ["v1.2.3"], "write '## 1.2.3 (YYYY-MM-DD)'"),
        ("", DATED, ["v1.2.2"], "no tag v1.2.3 points here; `git tag -s v1.2.3"),
    ],
    ids=["dirty", "unreleased", "another", "untagged"],
)
def test_what_is_missing_is_named(status: str, heading: str, tags: list[str], says: str) -> None:
    (problem,) = release.problems("1.2.3", status, heading, tags, PROGRAMS)
    assert says in problem


def test_release_takes_what_builds_for_arm64() -> None:
    (problem,) = release.problems("1.2.3", "", DATED, ["v1.2.3"], PROGRAMS[:1])
    assert problem.endswith("`apt-get install qemu-user`")


@pytest.mark.parametrize("name", FILES)
def test_a_release_has_all_four_files(name: str) -> None:
    assert not list(release.unexpected("1.2.3", FILES))
    (problem,) = release.unexpected("1.2.3", [file for file in FILES if file != name])
    assert problem.startswith("dist has no file ")


def test_a_development_version_is_no_release() -> None:
    assert len(list(release.unexpected("1.2.4", FILES))) == 3
