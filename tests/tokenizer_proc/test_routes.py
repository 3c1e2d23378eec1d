"""Each path does what it should, and every error has OpenAI's shape."""

from typing import Any

import msgspec
import pytest

from headrace import __version__
from headrace.board import Board, Seat
from headrace.config import ModelCard, TokenizerConfig
from headrace.errors import InvalidValue
from headrace.messages import HttpRequest
from headrace.tokenizer_proc.generation import GenerationPlanner, Sequences
from headrace.tokenizer_proc.routes import Answer, Routes

PLANNED = Sequences([], [])


class FakePlanner(GenerationPlanner):
    """Refuses the body "bad" and plans any other."""

    def __init__(self) -> None:
        pass

    def chat(self, http: HttpRequest, body: bytes | memoryview) -> Sequences:
        if body == b"bad":
            raise InvalidValue("messages: are bad", "messages")
        return PLANNED

    completion = chat


def make_routes() -> Routes:
    card = ModelCard(
        path="/models/tiny",
        name="org/tiny",
        max_model_len=128,
        vocab_size=256,
        eos_token_ids=[],
        chat_template=None,
        special_tokens={},
    )
    config = TokenizerConfig(
        run_dir="", card=card, num_frontends=1, num_detokenizers=1, seed=0, started_at=77
    )
    return Routes(config, Board.create([Seat("engine", 0)]), FakePlanner())


def ask(method: str, path: str, body: bytes = b"") -> Answer | Sequences:
    return make_routes().handle(HttpRequest(0, method, path, 0.0), body)


def answer(method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
    outcome = ask(method, path, body)
    assert isinstance(outcome, Answer)
    assert outcome.content_type == "application/json"
    return outcome.status, msgspec.json.decode(outcome.body)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_generation_goes_to_the_engine(path: str) -> None:
    assert ask("POST", path) is PLANNED


def test_a_refused_body_is_answered_in_openais_shape() -> None:
    assert answer("POST", "/v1/chat/completions", b"bad") == (
        400,
        {
            "error": {
                "message": "messages: are bad",
                "type": "invalid_request_error",
                "param": "messages",
                "code": "invalid_value",
            }
        },
    )


def test_models_lists_the_one_model() -> None:
    status, body = answer("GET", "/v1/models")
    assert status == 200
    assert body == {
        "object": "list",
        "data": [
            {
                "id": "org/tiny",
                "object": "model",
                "created": 77,
                "owned_by": "headrace",
                "root": "/models/tiny",
                "max_model_len": 128,
            }
        ],
    }


def test_a_model_is_found_by_name_even_with_a_slash() -> None:
    assert answer("GET", "/v1/models/org/tiny")[1]["id"] == "org/tiny"


def test_another_model_is_not_found() -> None:
    status, body = answer("GET", "/v1/models/gpt-4")
    assert status == 404
    assert body["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/chat/completions/", "/v1/modelsx"])
def test_an_unknown_path_is_not_found(path: str) -> None:
    status, body = answer("POST", path)
    assert status == 404
    assert body["error"]["message"] == f"there is nothing at {path}"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET"),
        ("DELETE", "/v1/models/org/tiny", "GET"),
    ],
)
def test_another_method_is_refused_with_the_right_one(method: str, path: str, allowed: str) -> None:
    status, body = answer(method, path)
    assert status == 405
    assert body["error"]["message"] == f"{path} takes {allowed}, not {method}"


def test_version_is_the_packages() -> None:
    assert answer("GET", "/version") == (200, {"version": __version__})


def test_metrics_are_prometheus_text() -> None:
    outcome = ask("GET", "/metrics")
    assert isinstance(outcome, Answer)
    assert outcome.content_type.startswith("text/plain; version=")
    assert b'headrace:process_up{model_name="org/tiny",process="engine 0"} 0.0' in outcome.body
