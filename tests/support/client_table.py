"""The table in docs/clients.md, which a run of `make ecosystem` writes."""

import re
from pathlib import Path

from clients import CAPABILITIES, CLIENTS, ROOT, Client, version

PAGE = ROOT / "docs" / "clients.md"
MODELS = ("demo", "qwen")
HEADER = "| client | version | " + " | ".join(CAPABILITIES) + " |"
RULE = "| --- " * (2 + len(CAPABILITIES)) + "|"
NOTE_LENGTH = 120

Outcomes = dict[str, dict[str, str]]  # by capability


def cell(capability: str, by_model: dict[str, Outcomes]) -> str:
    """Return a client's cell: one word if both models agree."""
    told = {model: by_model[model][capability] for model in MODELS}
    words = {
        model: word(capability, told[model]["outcome"], told[model]["note"]) for model in MODELS
    }
    if len(set(words.values())) == 1:
        return words["demo"]
    return "; ".join(f"{model}: {words[model]}" for model in MODELS)


def word(capability: str, outcome: str, note: str) -> str:
    """Return what became of a capability with one model."""
    if outcome == "ok":
        return "ok, answered" if (capability, note) == ("auto", "answered") else "ok"
    said = " ".join(note.split()).replace("|", "\\|")[:NOTE_LENGTH]
    return f"{outcome}: {said}" if said else outcome


def row(client: Client, by_model: dict[str, Outcomes]) -> str:
    """Return a client's row."""
    cells = [cell(capability, by_model) for capability in CAPABILITIES]
    return "| " + " | ".join([client.name, version(client), *cells]) + " |"


def write(outcomes: dict[Client, dict[str, Outcomes]], page: Path = PAGE) -> None:
    """Write the rows of the clients that met both models; others stay as they are."""
    text = page.read_text()
    rows = dict(re.findall(r"^(\| ([^|]+?) \| .*\|)$", text, re.MULTILINE))
    rows = {name: line for line, name in rows.items()}
    for client, by_model in outcomes.items():
        if by_model.keys() == set(MODELS):
            rows[client.name] = row(client, by_model)
    table = [HEADER, RULE, *(rows[client.name] for client in CLIENTS if client.name in rows)]
    before, _, rest = text.partition(HEADER)
    after = rest.partition("\n\n")[2]
    page.write_text(before + "\n".join(table) + "\n\n" + after)
