"""The dependencies: what is pinned, hashed, bounded and listed with its licence."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
CI = ROOT / ".ci"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OF_EXTRAS = [
    requirement
    for name, texts in PROJECT["optional-dependencies"].items()
    for requirement in map(Requirement, texts)
    if name != "demo" and requirement.name != "headrace"
]
DIRECT = [Requirement(text) for text in PROJECT["dependencies"]] + OF_EXTRAS
MADE = ("requirements.txt", "requirements-extras.txt", "requirements-torch.txt")
OF_TORCH = re.compile(r"torch|triton|nvidia-.*|cuda-.*")


def entries(name: str) -> dict[str, list[tuple[str, int]]]:
    """Return the pins of a file that apply here: versions by name, each with how many hashes."""
    text = (ROOT / name).read_text()
    found: dict[str, list[tuple[str, int]]] = {}
    for head, hashes in re.findall(r"^([^#\s].*?)(?: \\)?\n((?:    --hash.*\n)*)", text, re.M):
        requirement = Requirement(head)
        if requirement.marker is None or requirement.marker.evaluate():
            (pinned,) = requirement.specifier
            assert pinned.operator == "==", head
            number = len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", hashes))
            found.setdefault(requirement.name, []).append((pinned.version, number))
    return found


@pytest.fixture(scope="module")
def audit() -> Any:
    """The script that finds what is installed."""
    spec = importlib.util.spec_from_file_location("audit", CI / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    audit = sys.modules["audit"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(audit)
    return audit


@pytest.fixture(scope="module")
def installed(audit: Any) -> dict[str, str]:
    """The versions that are installed of all that headrace and its extras need, by name."""
    found: dict[str, str] = audit.installed(audit.ROOTS)
    return found


def test_every_dependency_has_a_lower_and_an_upper_bound() -> None:
    for requirement in DIRECT:
        assert {bound.operator for bound in requirement.specifier} == {">=", "<"}, requirement


def test_installed_versions_are_within_their_bounds() -> None:
    for requirement in DIRECT:
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            assert requirement in OF_EXTRAS
            continue
        assert requirement.specifier.contains(found, prereleases=True), (requirement, found)


def test_every_dependency_is_pinned_with_hashes(installed: dict[str, str]) -> None:
    pinned = entries("requirements.txt") | entries("requirements-extras.txt")
    needed = {name for name in installed if not OF_TORCH.fullmatch(name)}
    assert needed <= pinned.keys(), "make lock"
    for name, versions in pinned.items():
        ((_, num_hashes),) = versions
        assert num_hashes, name
    assert not [name for name in pinned if OF_TORCH.fullmatch(name)]


def test_a_plain_install_takes_no_package_of_an_extra(audit: Any) -> None:
    pinned = entries("requirements.txt")
    assert audit.installed(audit.PLAIN).keys() <= pinned.keys(), "make lock"
    assert not {requirement.name for requirement in OF_EXTRAS} & pinned.keys()
    assert not entries("requirements-extras.txt").keys() & pinned.keys()


def test_pins_are_within_the_bounds_and_the_constraints() -> None:
    pinned = entries(MADE[0]) | entries(MADE[1]) | entries(MADE[2])
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = [Requirement(line) for line in lines if not line.startswith("#")]
    for requirement in [*DIRECT, *constraints]:
        if requirement.name in pinned:
            ((found, _),) = pinned[requirement.name]
            assert requirement.specifier.contains(found), (requirement, found)
    assert {requirement.name for requirement in DIRECT} <= pinned.keys()


def test_torch_for_gpus_is_pinned_with_hashes() -> None:
    pinned = entries("requirements-torch.txt")
    assert "torch" in pinned
    for name, versions in pinned.items():
        assert OF_TORCH.fullmatch(name)
        assert [number for _, number in versions if not number] == [], name


def test_every_dependency_has_a_licence_in_the_list(installed: dict[str, str]) -> None:
    command = [sys.executable, CI / "licences.py"]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    told = (ROOT / "docs/licences.md").read_text()
    rows = re.findall(r"^\| ([\w-]+) \| (.*?) \|", told, re.MULTILINE)
    licences = dict(rows)
    assert all(licence for _, licence in rows)
    assert installed.keys() <= licences.keys(), "make licences"
    now = dict(re.findall(r"^\| ([\w-]+) \| (.*?) \|", made, re.MULTILINE))
    assert {name: licences[name] for name in now} == now, "make licences"
