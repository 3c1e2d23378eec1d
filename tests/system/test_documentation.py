"""What the pages show works, as it stands there.

`test_tool_docs.py` has the page about tools, `test_testing_page.py` the one about tests.
"""

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml
from described import answer_examples
from examples import ROOT, blocks, needs_curl, run_command, run_program
from servers import HELD, RunningServer

EMBEDDINGS = "docs/api/embeddings.md"  # in `test_embeddings.py`
FAMILIES = [
    "docs/api.md",
    "docs/api/completions.md",
    "docs/api/responses.md",
    "docs/api/messages.md",
    "docs/api/generate.md",
    "docs/api/tokenize.md",
]
PAGES = {
    "README.md",
    *FAMILIES,
    EMBEDDINGS,
    "docs/operations.md",
    "docs/structured_output.md",
    "docs/testing.md",
    "docs/tools.md",
    "docs/getting_started.md",
    "docs/how_to/python_client.md",
    "docs/how_to/embedded.md",
}


def test_no_page_with_examples_is_left_out() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    shown = {page for page in pages if re.search(r"```(\w+)$|\bcurl\b", page.read_text(), re.M)}
    assert {str(page.relative_to(ROOT)) for page in shown} == PAGES


def test_page_about_running_shows_the_fields_of_health(server: RunningServer) -> None:
    (shown,) = map(json.loads, blocks("docs/operations.md", "json"))
    told = httpx.get(f"{server.url}/health").json()
    assert shown.keys() == told.keys()
    assert shown["processes"][0].keys() == told["processes"][0].keys()


def test_examples_of_openapi_are_answered(server: RunningServer) -> None:
    assert answer_examples(server.url) >= {
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/responses",
        "/tokenize",
    }


@needs_curl
@pytest.mark.parametrize("command", [one for page in FAMILIES for one in blocks(page, "sh")])
def test_the_commands_about_the_apis_work(server: RunningServer, command: str) -> None:
    assert '"error":{' not in run_command(command, server.url)


def test_the_program_about_structured_output_works(server: RunningServer) -> None:
    programs = blocks("docs/structured_output.md", "python")
    assert len(programs) == 5
    run_program("\n".join(programs), server.url)


def test_getting_started_shows_requests_that_work(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = blocks("docs/getting_started.md", "python")
    run_program(program, server.url)
    assert capsys.readouterr().out
    if shutil.which("curl"):
        page = (ROOT / "docs/getting_started.md").read_text()
        (command,) = re.findall(r"^    (curl (?:.*\\\n)*.*)$", page, re.MULTILINE)
        assert "Paris" in run_command(command, server.url)


def test_every_page_has_a_place_in_the_site() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def pages(nav: Any) -> Iterator[str]:
        if isinstance(nav, str):
            yield nav
        else:
            for item in nav if isinstance(nav, list) else nav.values():
                yield from pages(item)

    docs = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    assert sorted(pages(site["nav"])) == sorted(docs)


@needs_curl
def test_the_command_of_the_readme_works(server: RunningServer) -> None:
    readme = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"^    (curl (?:.*\\\n)*.*)$", readme, re.MULTILINE)
    assert "Paris" in run_command(command, server.url)
    usual = RunningServer(*HELD)  # rounds more than the other
    assert "Paris" in run_command(command, usual.url)
    assert usual.stop() == 0


def test_programs_of_the_how_tos_work(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    (with_client,) = blocks("docs/how_to/python_client.md", "python")
    run_program(with_client, server.url)
    assert capsys.readouterr().out
    (with_engine,) = blocks("docs/how_to/embedded.md", "python")
    run_program(with_engine, server.url)
    assert "1, 2, 3," in capsys.readouterr().out
