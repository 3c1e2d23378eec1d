"""The table in docs/clients.md."""

import os
from pathlib import Path

import client_table
import clients
import pytest
from clients import CAPABILITIES, CLIENTS, PACKAGES, version

OK = {name: {"capability": name, "outcome": "ok", "note": ""} for name in CAPABILITIES}
LACKING = OK | {"named": {"outcome": "not offered", "note": "the model decides"}}
BROKEN = OK | {"stream": {"outcome": "failed", "note": "ValueError: a | b\n" + 200 * "c"}}
ANSWERED = OK | {"auto": {"outcome": "ok", "note": "answered"}}
OPENAI, ANTHROPIC = CLIENTS[0], CLIENTS[2]


def test_table_cell_says_where_models_differ() -> None:
    both = {"demo": OK, "qwen": OK}
    assert client_table.cell("chat", both) == "ok"
    lacking = {"demo": LACKING, "qwen": LACKING}
    assert client_table.cell("named", lacking) == "not offered: the model decides"
    answered = {"demo": ANSWERED, "qwen": OK}
    assert client_table.cell("auto", answered) == "demo: ok, answered; qwen: ok"
    broken = client_table.cell("stream", {"demo": BROKEN, "qwen": OK})
    assert broken.startswith("demo: failed: ValueError: a \\| b ccc")
    assert broken.endswith("c; qwen: ok")


def test_table_keeps_rows_of_clients_not_run(tmp_path: Path) -> None:
    page = tmp_path / "clients.md"
    page.write_text(f"# Before\n\n{client_table.HEADER}\n{client_table.RULE}\n\nAfter.\n")
    client_table.write({ANTHROPIC: {"demo": OK, "qwen": OK}}, page)
    client_table.write({OPENAI: {"demo": OK, "qwen": LACKING}, ANTHROPIC: {"demo": BROKEN}}, page)
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("# Before", "After.")
    assert [line.split(" | ")[0] for line in lines if line.startswith("| ")] == [
        "| client",
        "| ---",
        "| openai",
        "| anthropic",
    ]
    assert "failed" not in page.read_text()


def test_client_takes_no_package_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "ENVIRONMENTS", tmp_path)
    monkeypatch.setenv("PYTHONPATH", "ours")
    environs = []
    monkeypatch.setattr(
        clients.subprocess, "run", lambda _, env=None, **rest: environs.append(env or os.environ)
    )
    clients.install("openai")
    assert ["PYTHONPATH" in environ for environ in environs] == [False]


def test_client_version_is_that_of_its_own_package() -> None:
    versions = {client.name: version(client) for client in CLIENTS}
    for name in ("langchain-openai", "langchain-anthropic"):
        assert f"{name}=={versions[name]}" in PACKAGES["langchain"]
    assert f"openai-agents=={versions['openai-agents (responses)']}" in PACKAGES["openai-agents"]
    assert f"aider-chat=={versions['aider']}" in PACKAGES["aider"]
