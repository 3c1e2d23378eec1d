"""The scripts in examples/, each run against a server of a model that suits it."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from embedding_models import minilm
from examples import ROOT, run_program
from servers import RunningServer
from tiny_vision import make_vision_folder

EXAMPLES = ROOT / "examples"
ON_DEMO_MODEL = ("chat", "stream", "tools", "structured_output")
ON_EMBEDDING_MODEL = ("embeddings", "search")


@pytest.fixture(scope="module")
def embedding_server() -> Iterator[RunningServer]:
    """A server of all-MiniLM-L6-v2."""
    running = RunningServer(str(minilm()))
    yield running
    assert running.stop() == 0


def run_script(name: str, url: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a script as from a command line without arguments; return its output."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"examples/{name}.py"])
        run_program((EXAMPLES / f"{name}.py").read_text(), url)
    return capsys.readouterr().out


def test_readme_lists_every_example() -> None:
    rows = re.findall(
        r"^\| \[(\w+)\.py\]\((\w+)\.py\) \|", (EXAMPLES / "README.md").read_text(), re.M
    )
    assert all(shown == linked for shown, linked in rows)
    tested = {*ON_DEMO_MODEL, *ON_EMBEDDING_MODEL, "images", "embedded_engine"}
    assert {shown for shown, _ in rows} == {path.stem for path in EXAMPLES.glob("*.py")} == tested


@pytest.mark.parametrize("name", ON_DEMO_MODEL)
def test_example_runs_on_the_demo_model(
    server: RunningServer, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = run_script(name, server.url, capsys)
    expected = {
        "chat": "The capital of France is Paris",
        "stream": " ...",
        "tools": "call: get_weather({",
        "structured_output": " inhabitants.",
    }
    assert expected[name] in output


def test_embeddings_example_prints_cosines(
    embedding_server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run_script("embeddings", embedding_server.url, capsys).splitlines()
    cosines = [list(map(float, re.findall(r"-?\d\.\d\d", row))) for row in rows]
    assert [row[i] for i, row in enumerate(cosines)] == [1.0] * 3
    assert cosines[0][1] > cosines[0][2], "a cat is nearer to a kitten than to oil"


def test_search_example_finds_the_document(
    embedding_server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    best, second = run_script("search", embedding_server.url, capsys).splitlines()
    assert best.endswith("The Eiffel Tower is in Paris.")
    assert float(best.split()[0]) > float(second.split()[0])


def test_images_example_prints_an_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_vision_folder(tmp_path, "smolvlm")  # its weights are random, and so is its answer
    running = RunningServer(str(tmp_path), "--kv-cache-memory-bytes", str(64 << 20))
    assert run_script("images", running.url, capsys).strip()
    assert running.stop() == 0


def test_embedded_engine_example_continues_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    output = run_script("embedded_engine", "", capsys)
    assert "1, 2, 3, 4, 5" in output
