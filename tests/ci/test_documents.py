"""Names and links in the documents lead somewhere."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)|\bsrc=\"([^\"]+)\"")
SOURCE = re.compile(r"`([\w/.]+\.(?:py|cpp|h|cuh))`")
MEMBER = re.compile(r"`(?:Step|StepOutput|ResponseFrames|HttpRequest)\.(\w+)`")
OWN_TERMS = 15


def tracked() -> list[str]:
    """Return the paths of all files of the repository."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files(page: Path) -> None:
    targets = [link or source for link, source in LINK.findall(page.read_text())]
    targets = [target.partition("#")[0] for target in targets if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("name", ["architecture.md", "decisions.md"])
def test_named_sources_exist(name: str) -> None:
    paths = [f"/{path}" for path in tracked()]
    named = set(SOURCE.findall((ROOT / "docs" / name).read_text()))
    assert [one for one in named if not any(path.endswith(f"/{one}") for path in paths)] == []


def test_named_fields_of_messages_exist() -> None:
    fields = set(MEMBER.findall((ROOT / "docs" / "architecture.md").read_text()))
    page = (ROOT / "docs" / "messages.md").read_text()
    assert fields
    assert [field for field in fields if f"`{field}`" not in page] == []


def test_architecture_links_to_its_companions() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for name in ("glossary", "decisions", "messages"):
        assert f"({name}.md)" in text


def test_glossary_has_few_terms() -> None:
    rows = re.findall(
        r"^\| (?!term|---)", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE
    )
    assert 0 < len(rows) <= OWN_TERMS
