"""What docs/testing.md shows works; what takes more packages is in `tests/ecosystem`."""

import json
from pathlib import Path
from typing import get_args

import pytest
from examples import ROOT, blocks, needs_curl, run_command, run_program
from testing_page import PAGE, program, run_tests_of

from headrace.testing import ScriptedServer
from headrace.testing.pytest_plugin import OPTIONS
from headrace.testing.script import MalformedKind, ScriptedAnswer, Undelayed


def test_examples_of_openai_and_anthropic_pass(tmp_path: Path) -> None:
    assert "3 passed" in run_tests_of(tmp_path)


def test_program_without_pytest_works(capsys: pytest.CaptureFixture[str]) -> None:
    run_program(program(), "")
    assert capsys.readouterr().out.endswith("/v1 1\n")


@needs_curl
def test_commands_of_the_page_set_a_script() -> None:
    (commands,) = blocks(PAGE, "sh")
    with ScriptedServer() as server:
        assert json.loads(run_command(commands.partition("\ncurl")[0], server.url)) == {
            "num_left": [1, 1]
        }
        assert "error" not in run_command(commands, server.url)


def test_page_names_every_answer_and_option() -> None:
    page = (ROOT / PAGE).read_text()
    for answer in {*get_args(ScriptedAnswer), *get_args(Undelayed)}:
        assert f"`{answer.__name__}(" in page
    for kind in get_args(MalformedKind):
        assert f'`Malformed("{kind}"' in page
    for name in OPTIONS:
        assert f"`--headrace-{name}`" in page
