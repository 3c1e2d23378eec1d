"""The dashboard asks for nothing that /metrics does not have; the page about it, too."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.board.board import Board, State
from headrace.config.config import ServerConfig
from headrace.config.process_configs import ModelCard
from headrace.metrics.headrace_metrics import render_metrics
from headrace.supervision.seats import seats_of

DASHBOARD = Path(__file__).parents[3] / "docs/grafana.json"
METRIC = re.compile(r"\b(?:vllm|headrace):\w+")
LABEL = re.compile(r"by \(([^)]*)\)")
CARD = ModelCard(
    path="",
    name="org/tiny",
    max_model_len=300,
    vocab_size=1,
    eos_token_ids=[],
    chat_template=None,
    special_tokens={},
)


@pytest.fixture
def labels() -> dict[str, set[str]]:
    """The labels of every sample of a server, by its name."""
    board = Board.create(seats_of(ServerConfig(kv_store_bytes=1)))
    for slot in board.slots:
        slot.enter(State.READY)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(render_metrics(board, [CARD]).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def panels() -> list[dict[str, Any]]:
    return [p for p in json.loads(DASHBOARD.read_text())["panels"] if p["type"] != "row"]


def test_every_metric_of_the_dashboard_exists_with_its_labels(
    labels: dict[str, set[str]],
) -> None:
    expressions = [target["expr"] for panel in panels() for target in panel["targets"]]
    assert len(expressions) > 30
    for expression in expressions:
        names = METRIC.findall(expression)
        assert names, expression
        for name in names:
            assert name in labels, expression
            assert "model_name" in labels[name]
            grouped = {x.strip() for by in LABEL.findall(expression) for x in by.split(",")} - {""}
            assert grouped <= labels[name], expression


def test_panels_are_numbered_and_do_not_overlap() -> None:
    everything = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_the_page_about_metrics_has_every_one_of_them(dialect: str) -> None:
    page = (DASHBOARD.parent / "metrics.md").read_text()
    board = Board.create(seats_of(ServerConfig()))
    text = render_metrics(board, [CARD], dialect).decode()
    for family in text_string_to_metric_families(text):
        assert f"| `{family.name}` | {family.type} | {family.documentation} |\n" in page
