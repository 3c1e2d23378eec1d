"""The table in docs/models.md, which a run of `make families` writes."""

import os
from pathlib import Path

from source_tree import ROOT

PAGE = ROOT / "docs" / "models.md"
WAYS = ("alone", "batched", "chunked", "cached", "preempted", "drafts", "worker lost", "tp 2")
HEADER = "| family | runs in | " + " | ".join(f"`--{w}`" if w[:2] == "tp" else w for w in WAYS)
HEADER += " |"
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


def write(rows: Rows, page: Path = PAGE) -> None:
    """Write the rows of families that were run; others stay as they are."""
    text, rows = page.read_text(), read(page) | rows
    order = sorted(rows, key=lambda name: (rows[name][0], name))
    table = [HEADER, RULE, *(f"| {name} | " + " | ".join(rows[name]) + " |" for name in order)]
    before, _, rest = text.partition(HEADER)
    after = rest.partition("\n\n")[2]
    page.write_text(before + "\n".join(table) + "\n\n" + after)
