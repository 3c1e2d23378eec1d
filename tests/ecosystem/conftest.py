"""The servers and the clients of `make ecosystem`, and the table that a run of it leaves."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import client_table
import clients
import pytest
from client_table import Outcomes
from clients import Client
from servers import RunningServer

from headrace.config.model_card import find_demo_model
from headrace.model.tokenizer_json import read_tokenizer_json
from support.real_models import fetch, real_file

QWEN = "qwen2.5-coder-1.5b"
MODEL_ARGUMENTS = {
    "demo": ("--dtype", "float32"),
    "qwen": (str(real_file(QWEN)),),
}
OUTCOMES: dict[Client, dict[str, Outcomes]] = {}


@pytest.fixture(scope="session")
def ecosystem(request: pytest.FixtureRequest) -> Callable[[], AbstractContextManager[None]]:
    """A context that shows the progress of an installation; without `make ecosystem`, a skip."""
    if "ECOSYSTEM" not in os.environ:
        pytest.skip("make ecosystem")
    manager: Any = request.config.pluginmanager.getplugin("capturemanager")
    shown: Callable[[], AbstractContextManager[None]] = manager.global_and_fixture_disabled
    return shown


@pytest.fixture(scope="session", params=client_table.MODELS)
def served(
    request: pytest.FixtureRequest, ecosystem: Callable[[], AbstractContextManager[None]]
) -> Iterator[tuple[str, RunningServer]]:
    """The name of a model and its server; one model is served after the other."""
    name = request.param
    if name == "qwen":
        with ecosystem():
            fetch(QWEN)
    running = RunningServer(*MODEL_ARGUMENTS[name], "--served-model-name", name)
    yield name, running
    assert running.stop() == 0


@pytest.fixture
def tokenizer(served: tuple[str, RunningServer], tmp_path: Path) -> Path:
    """A folder with the served model's tokenizer, for tools that make prompts of a length."""
    model, _ = served
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    file = real_file(QWEN) if model == "qwen" else find_demo_model()
    (folder / "tokenizer.json").write_bytes(read_tokenizer_json(file))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.fixture
def outcomes(
    request: pytest.FixtureRequest,
    served: tuple[str, RunningServer],
    ecosystem: Callable[[], AbstractContextManager[None]],
) -> Outcomes:
    """What became of each capability of a client, the test's parameter, which is run once."""
    client: Client = request.param
    model, server = served
    by_model = OUTCOMES.setdefault(client, {})
    if model not in by_model:
        with ecosystem():
            clients.install(client.environment)
        by_model[model] = clients.drive(client, server.url, model)
    return by_model[model]


def pytest_sessionfinish() -> None:
    """Write what has been found into the page's table."""
    if OUTCOMES:
        client_table.write(OUTCOMES)
