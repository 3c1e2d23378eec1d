"""What the pages show works, as it stands there. Those about tools are in `test_tool_docs.py`."""

import json
import re

import httpx
import pytest
import yaml
from described import answer_examples
from examples import ROOT, blocks, needs_curl, run_command, run_program
from servers import HELD, RunningServer

from headrace.config.flags import from_flags
from headrace.frontend.health import PATHS as HEALTH_PATHS
from headrace.routes import PING

EMBEDDINGS = "docs/api/embeddings.md"  # in `test_embeddings.py`
FAMILIES = [
    *("docs/api.md", "docs/api/completions.md", "docs/api/responses.md", "docs/api/messages.md"),
    *("docs/api/generate.md", "docs/api/tokenize.md"),
]
PAGES = {
    *("README.md", *FAMILIES, EMBEDDINGS, "docs/operations.md"),
    *("docs/structured_output.md", "docs/tools.md"),
}


def test_no_page_with_examples_is_left_out() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    shown = {page for page in pages if re.search(r"```(\w+)$|\bcurl\b", page.read_text(), re.M)}
    assert {str(page.relative_to(ROOT)) for page in shown} == PAGES


def test_the_page_about_running_shows_what_is_told_of_health(server: RunningServer) -> None:
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


def test_units_in_operations_docs_start_a_server() -> None:
    (unit,) = blocks("docs/operations.md", "ini")
    (manifest,) = map(yaml.safe_load, blocks("docs/operations.md", "yaml"))
    (command,) = re.findall(r"^ExecStart=\S+/launch_server (.*)$", unit, re.MULTILINE)
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    name, *arguments = container["args"]
    assert name == "launch_server"
    for argv in (command.split(), arguments):
        assert from_flags(argv).drain_timeout == 60
    probes = [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness")]
    probes.append(container["livenessProbe"]["httpGet"]["path"])
    assert {*probes, PING} == set(HEALTH_PATHS)


@needs_curl
@pytest.mark.parametrize("command", [one for page in FAMILIES for one in blocks(page, "sh")])
def test_the_commands_about_the_apis_work(server: RunningServer, command: str) -> None:
    assert "error" not in run_command(command, server.url).replace('"error":null', "")


def test_the_program_about_structured_output_works(server: RunningServer) -> None:
    programs = blocks("docs/structured_output.md", "python")
    assert len(programs) == 5
    run_program("\n".join(programs), server.url)


@needs_curl
def test_the_command_of_the_readme_works(server: RunningServer) -> None:
    readme = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"^    (curl (?:.*\\\n)*.*)$", readme, re.MULTILINE)
    assert "Paris" in run_command(command, server.url)
    usual = RunningServer(*HELD)  # rounds more than the other
    assert "Paris" in run_command(command, usual.url)
    assert usual.stop() == 0


def test_the_programs_of_the_readme_work(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with_client, with_engine = blocks("README.md", "python")
    run_program(with_client, server.url)
    assert capsys.readouterr().out
    run_program(with_engine, server.url)
    assert "1, 2, 3," in capsys.readouterr().out
