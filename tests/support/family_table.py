"""The table in docs/models.md and its short form in README.md, which `make families` writes."""

import os
from pathlib import Path

from source_tree import ROOT

PAGE = ROOT / "docs" / "models.md"
README = ROOT / "README.md"
WAYS = ("alone", "batched", "chunked", "cached", "preempted", "drafts", "worker lost", "tp 2")
HEADER = "| family | runs in | " + " | ".join(f"`--{w}`" if w[:2] == "tp" else w for w in WAYS)
HEADER += " |"
SHORT_HEADER = "| families | run in | text of transformers, in fp32 |"
RULE = "| --- " * (2 + len(WAYS)) + "|"
WRITES = "FAMILIES_TABLE" in os.environ
EXACT, DIFFERS, NOT_COMPARED = "exact", "differs", "-"
CORE, MODULES = "core", "modules"

Rows = dict[str, list[str]]  # the cells behind the family's name

RECORD: Rows = {}  # of this run


def record(family: str, runs_in: str, outcomes: dict[str, bool]) -> None:
    """Keep what became of a family, by way: whether its text was that of transformers."""
    words = {way: EXACT if is_exact else DIFFERS for way, is_exact in outcomes.items()}
    RECORD[family] = [runs_in, *(words.get(way, NOT_COMPARED) for way in WAYS)]


def read(page: Path = PAGE) -> Rows:
    """Return the rows of the page."""
    table = page.read_text().partition(HEADER)[2].partition("\n\n")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return {name: cells for name, *cells in lines}


def rows() -> Rows:
    """Return the rows of the page, with what this run will write."""
    return read() | (RECORD if WRITES else {})


def short(rows: Rows) -> list[str]:
    """Return the rows of README.md: families that run in one place and fared alike."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, (runs_in, *cells) in sorted(rows.items()):
        alike.setdefault((runs_in, summary(cells)), []).append(name)
    return [
        f"| {', '.join(f'`{name}`' for name in names)} | {runs_in} | {text} |"
        for (runs_in, text), names in sorted(alike.items())
    ]


def summary(cells: list[str]) -> str:
    """Return what became of a family in all ways."""
    if set(cells) == {EXACT}:
        return "exact in each way"
    words = {EXACT: EXACT, DIFFERS: DIFFERS, NOT_COMPARED: "not compared"}
    ways = {
        word: ", ".join(way for way, cell in zip(WAYS, cells, strict=True) if cell == kind)
        for kind, word in words.items()
    }
    return "; ".join(f"{word}: {which}" for word, which in ways.items() if which)


def write(rows: Rows, page: Path = PAGE, readme: Path = README) -> None:
    """Write the rows of families that were run; others stay as they are."""
    rows = read(page) | rows
    order = sorted(rows, key=lambda name: (rows[name][0], name))
    lines = [f"| {name} | " + " | ".join(rows[name]) + " |" for name in order]
    replace_table(page, HEADER, [RULE, *lines])
    replace_table(readme, SHORT_HEADER, ["| --- | --- | --- |", *short(rows)])


def replace_table(page: Path, header: str, lines: list[str]) -> None:
    """Replace what is below a header, up to an empty line."""
    before, _, rest = page.read_text().partition(header)
    after = rest.partition("\n\n")[2]
    page.write_text(before + "\n".join([header, *lines]) + "\n\n" + after)
