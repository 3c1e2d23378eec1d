"""What `--save --add` keeps of an earlier run, and when it refuses."""

import argparse
import json
from pathlib import Path

import pytest

from support import report as reports
from support.report import Quantity, Report


def run(models: list[str], samples: dict[str, list[float]], add: bool = True) -> None:
    report = Report("example", argparse.Namespace(save=["here"], add=add, models=models))
    for name, values in samples.items():
        report.add(Quantity(name, "tok/s", {"ours": values}, True))
    report.finish()


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(reports, "ROOT", tmp_path)
    monkeypatch.setattr(reports, "RESULTS", tmp_path)
    monkeypatch.setattr(reports, "draw", lambda report, path: None)
    monkeypatch.setattr(reports, "commit", lambda: "1234567")
    return tmp_path / "example-here.json"


def test_a_saved_run_takes_more_rows(saved: Path) -> None:
    run(["a", "b"], {"a": [1.0], "b": [2.0]})
    run(["b", "c"], {"b": [3.0], "c": [4.0]})
    result = json.loads(saved.read_text())
    assert [row["quantity"] for row in result["quantities"]] == ["a", "b", "c"]
    assert [row["medians"]["ours"] for row in result["quantities"]] == [1, 3, 4]
    assert result["options"]["models"] == ["a", "b", "c"]
    run(["d"], {"d": [5.0]}, add=False)
    assert [row["quantity"] for row in json.loads(saved.read_text())["quantities"]] == ["d"]


def test_added_rows_keep_the_commit_of_their_run(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(["a"], {"a": [1.0]})
    for commit in ("7654321", "abcdef0"):
        monkeypatch.setattr(reports, "commit", lambda commit=commit: commit)
        run([commit], {commit: [2.0]})
    result = json.loads(saved.read_text())
    assert result["commit"] == "abcdef0"
    commits = [row.get("commit") for row in result["quantities"]]
    assert commits == ["1234567", "7654321", None]


def test_a_run_beside_another_peer_is_not_added_to(saved: Path) -> None:
    run(["a"], {"a": [1.0]})
    version = json.loads(saved.read_text())["versions"]["numpy"]
    saved.write_text(saved.read_text().replace(f'"{version}"', '"0.1"'))
    before = saved.read_text()
    with pytest.raises(SystemExit, match="--add: the saved run has versions"):
        run(["b"], {"b": [2.0]})
    assert saved.read_text() == before
