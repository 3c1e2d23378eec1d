"""The commit gate, and the hooks that call it."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "commit_subject.py"
spec = importlib.util.spec_from_file_location("commit_subject", SCRIPT)
assert spec is not None
assert spec.loader is not None
commit_subject = importlib.util.module_from_spec(spec)
spec.loader.exec_module(commit_subject)

SHORT = "s" * 70
LONG = "s" * 71
IDENTITY = ("-c", "user.name=tester", "-c", "user.email=tester@localhost")


def git(root: Path, *arguments: str) -> str:
    """Run git in a repository, undisturbed by hooks and settings of the machine."""
    command = ["git", "-C", str(root), "-c", "core.hooksPath=/dev/null", *IDENTITY, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of one commit."""
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "--initial-branch", "main")
    commit(root, LONG)
    return root


def commit(root: Path, message: str) -> str:
    """Make an empty commit; return its id."""
    git(root, "commit", "--allow-empty", "--message", message)
    return git(root, "rev-parse", "HEAD")


@pytest.mark.parametrize(
    ("message", "subject"),
    [
        ("docs: a page\n\nWhy.\n", "docs: a page"),
        ("docs: a page\nof two lines\n\nWhy.\n", "docs: a page of two lines"),
        ("\n# a comment\ndocs: a page\n# another\n", "docs: a page"),
        ("# comments alone\n", ""),
    ],
)
def test_subject_is_the_first_paragraph(message: str, subject: str) -> None:
    assert commit_subject.subject_of(message) == subject


@pytest.mark.parametrize(("subject", "status"), [(SHORT, 0), (LONG, 1)])
def test_hook_refuses_more_than_70_characters(
    tmp_path: Path, subject: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    message = tmp_path / "COMMIT_EDITMSG"
    message.write_text(f"{subject}\n\n{LONG}{LONG}\n")
    assert commit_subject.main([str(message)]) == status
    assert ("71 characters, at most 70" in capsys.readouterr().err) == (status == 1)


def test_gate_checks_commits_after_the_base_alone(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_subject, "ROOT", repository)
    monkeypatch.setattr(commit_subject, "BASE", git(repository, "rev-parse", "HEAD"))
    commit(repository, SHORT)
    assert commit_subject.main([]) == 0
    commit(repository, LONG)
    assert commit_subject.main([]) == 1


def test_gate_exempts_merge_commits(repository: Path) -> None:
    base = commit(repository, SHORT)
    git(repository, "switch", "--create", "other")
    commit(repository, "other")
    git(repository, "switch", "main")
    git(repository, "merge", "--no-ff", "--message", LONG, "other")
    assert commit_subject.subjects_since(base, repository) == ["other"]


def test_gate_passes_where_the_base_is_missing(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = git(repository, "rev-parse", "HEAD")
    commit(repository, LONG)
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "--depth", "1", repository.as_uri(), str(shallow))
    no_repository = tmp_path / "archive"
    no_repository.mkdir()
    for root in (shallow, no_repository):
        assert commit_subject.subjects_since(base, root) == []
        assert base in capsys.readouterr().err


def test_hooks_call_programs_of_the_venv() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (repository,) = config["repos"]
    assert repository["repo"] == "local"  # others are fetched
    stages = {}
    for hook in repository["hooks"]:
        assert hook["language"] == "system"
        program, *arguments = hook["entry"].split()
        assert (Path(sys.executable).parent / program.removeprefix(".venv/bin/")).exists()
        assert all((ROOT / part).exists() for part in arguments if re.match(r"[\w.]+/", part))
        stages[hook["id"]] = hook.get("stages", config["default_stages"])
    assert stages.pop("commit-subject") == ["commit-msg"]
    assert stages.keys() == {"ruff-format", "ruff-check", "mypy", "clang-format"}
    assert set(config["default_install_hook_types"]) == {"pre-commit", "commit-msg"}


def test_ci_runs_the_commit_gate() -> None:
    assert ".ci/commit_subject.py" in (ROOT / ".ci" / "run").read_text()
