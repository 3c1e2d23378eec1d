"""Each path does what it should, and every error has OpenAI's shape."""

import dataclasses
from typing import Any

import msgspec
import pytest
from byte_encoder import ByteEncoder, finish

from headrace import __version__
from headrace.board.board import Board, Seat
from headrace.board.fields import EngineField, FrontendField
from headrace.board.http_counts import STATUSES
from headrace.config.process_configs import ModelCard, TokenizerConfig
from headrace.errors import InvalidValue, RequestError
from headrace.ipc.messages import HttpRequest
from headrace.model.pooling import Pooling, PoolingKind
from headrace.routes import ROUTES, Lane
from headrace.tokenizer_proc.embedding_planner import EmbeddingPlanner
from headrace.tokenizer_proc.encoding.chat_template import ChatTemplate
from headrace.tokenizer_proc.generation import GenerationPlanner
from headrace.tokenizer_proc.info_routes import InfoRoutes
from headrace.tokenizer_proc.jobs.stages import (
    ImmediateResponse,
    Outcome,
    Sequences,
    Stages,
    Text,
    error_response,
)
from headrace.tokenizer_proc.openapi.openapi import openapi
from headrace.tokenizer_proc.requests.sampling import UNSUPPORTED
from headrace.tokenizer_proc.routes import Routes
from headrace.tokenizer_proc.tokenize_routes import TokenRoutes

PLANNED = Sequences([], [])


class FakePlanner(GenerationPlanner):
    """Refuses the body "bad" and plans any other."""

    def __init__(self) -> None:
        pass

    def chat(self, http: HttpRequest, body: bytes | memoryview) -> Stages:
        if body == b"bad":
            raise InvalidValue("messages: are bad", "messages")
        yield [Text("Hi", add_special_tokens=True)]
        return PLANNED

    completion = chat


def make_routes(dialect: str = "vllm") -> Routes:
    card = ModelCard(
        path="/models/tiny",
        name="org/tiny",
        max_model_len=128,
        vocab_size=256,
        eos_token_ids=[],
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}{{ tail }}"
        "{% if add_generation_prompt %}:{% endif %}",
        special_tokens={},
    )
    config = TokenizerConfig(
        run_dir="",
        cards=(card,),
        num_frontends=1,
        num_detokenizers=1,
        seed=0,
        started_at=77,
        num_tokenizers=1,
        max_batch_size=32,
        batch_wait_ms=2,
        metrics_dialect=dialect,
    )
    template = ChatTemplate(card.chat_template, {})
    tokens = TokenRoutes(card, template, ByteEncoder())
    embedding = EmbeddingPlanner(card, template, ByteEncoder(), 1)
    board = Board.create([Seat("engine", 0), Seat("frontend", 0)])
    return Routes(InfoRoutes(config, board), FakePlanner(), embedding, tokens)


def ask(method: str, path: str, body: bytes = b"") -> Outcome:
    stages = make_routes().handle(HttpRequest(0, method, path, 0.0), body)
    try:
        outcome: Outcome = finish(stages, ByteEncoder())
    except RequestError as error:
        outcome = error_response(error, path)
    return outcome


def answer(method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
    outcome = ask(method, path, body)
    assert isinstance(outcome, ImmediateResponse)
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


def test_an_error_is_in_the_words_of_the_api() -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        status, body = answer("GET", path)
        assert status == 405
        assert body == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": f"{path} takes POST, not GET"},
        }


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
                "parent": None,
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


def test_handlers_are_those_of_the_route_table() -> None:
    in_table = {
        (route.method, path)
        for route in ROUTES
        if route.lane in (Lane.INFO, Lane.TOKENIZER)
        for path in route.paths
    }
    handlers = make_routes().handlers.items()
    assert {(method, path) for path, methods in handlers for method in methods} == in_table


EMBEDDINGS = {  # which this model lacks
    *("/v1/embeddings", "/v1/embed", "/v2/embed", "/v1/rerank", "/v2/rerank", "/v1/score"),
}
OTHER_NAMES = {
    *("/rerank", "/score", "/get_model_info", "/get_server_info"),
    *("/load_lora_adapter", "/unload_lora_adapter"),
}


def test_every_path_is_described_unless_it_is_another_name() -> None:
    described = {(p, m) for p, o in answer("GET", "/openapi.json")[1]["paths"].items() for m in o}
    served = {(p, m.lower()) for p, ms in make_routes().handlers.items() for m in ms}
    assert {path for path, _ in served - described} == OTHER_NAMES | EMBEDDINGS
    assert {path for path, _ in described - served} == {"/docs", "/health", "/ready", "/startup"}


def test_what_is_never_done_is_not_described() -> None:
    schemas = answer("GET", "/openapi.json")[1]["components"]["schemas"]
    assert "top_k" in schemas["ChatRequest"]["properties"]
    del schemas["LoadLora"]
    del schemas["GenerateBody"]["properties"]["lora_path"]  # which alone takes it
    described = {name for schema in schemas.values() for name in schema.get("properties", ())}
    assert not described & {*UNSUPPORTED}


def test_description_says_what_must_not_be_empty() -> None:
    schemas = answer("GET", "/openapi.json")[1]["components"]["schemas"]
    assert schemas["ChatRequest"]["properties"]["messages"]["minItems"] == 1
    lists = schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"][1:]
    assert [form["minItems"] for form in lists] == [1, 1, 1]
    choices = schemas["GenerateBody"]["oneOf"]
    assert [choice["required"] for choice in choices] == [["text"], ["input_ids"]]


def test_an_embedding_model_has_no_chat_described() -> None:
    card = make_routes()._about._cards[0]
    embedding = dataclasses.replace(card, pooling=Pooling(PoolingKind.MEAN), embedding_size=8)
    paths = msgspec.json.decode(openapi([embedding]))["paths"]
    assert paths.keys() >= EMBEDDINGS
    assert not paths.keys() & {"/v1/chat/completions", "/v1/completions", "/generate"}


def test_description_has_the_limits_of_the_model() -> None:
    schemas = answer("GET", "/openapi.json")[1]["components"]["schemas"]
    assert schemas["DetokenizeRequest"]["properties"]["tokens"]["items"]["maximum"] == 255
    stop = schemas["CompletionRequest"]["properties"]["stop"]["anyOf"]
    assert [form.get("minLength") for form in stop] == [1, None, None]
    assert "chat_template" not in schemas["ChatRequest"]["properties"]
    assert not schemas["GenerateBody"]["properties"].keys() & {"token_ids_logprob", "image_data"}
    assert "mcp_servers" not in schemas["MessagesRequest"]["properties"]


def test_every_status_of_a_refusal_is_counted() -> None:
    kinds = [RequestError, *RequestError.__subclasses__()]
    assert len(kinds) > 5
    assert {kind.status for kind in kinds} <= set(STATUSES)


def test_version_is_the_packages() -> None:
    assert answer("GET", "/version") == (200, {"version": __version__})


def test_load_is_that_of_vllm() -> None:
    routes = make_routes()
    routes._about._board.slot("frontend")[FrontendField.ADMITTED] = 3
    told = finish(routes.handle(HttpRequest(0, "GET", "/load", 0.0), b""), ByteEncoder())
    assert isinstance(told, ImmediateResponse)
    assert msgspec.json.decode(told.body) == {"server_load": 3}


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info_is_that_of_sglang(path: str) -> None:
    assert answer("GET", path) == (
        200,
        {
            "model_path": "/models/tiny",
            "tokenizer_path": "/models/tiny",
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "has_image_understanding": False,
        },
    )


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info_is_that_of_sglang(path: str) -> None:
    routes = make_routes()
    engine = routes._about._board.slot("engine")
    engine[EngineField.PAGES_TOTAL], engine[EngineField.PAGE_TOKENS] = 10, 32
    told = finish(routes.handle(HttpRequest(0, "GET", path, 0.0), b""), ByteEncoder())
    assert isinstance(told, ImmediateResponse)
    found = msgspec.json.decode(told.body)
    assert (found["served_model_name"], found["context_length"]) == ("org/tiny", 128)
    assert (found["max_total_num_tokens"], found["version"]) == (320, __version__)
    assert found["internal_states"] == [{"last_gen_throughput": 0.0}]


def test_metrics_are_prometheus_text() -> None:
    outcome = ask("GET", "/metrics")
    assert isinstance(outcome, ImmediateResponse)
    assert outcome.content_type.startswith("text/plain; version=")
    assert b'headrace:process_up{model_name="org/tiny",process="engine 0"} 0.0' in outcome.body


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_metrics_speak_the_dialect_that_is_asked_for(dialect: str) -> None:
    found = make_routes(dialect).handle(HttpRequest(0, "GET", "/metrics", 0.0), b"")
    outcome = finish(found, ByteEncoder())
    assert isinstance(outcome, ImmediateResponse)
    lines = [line for line in outcome.body.decode().splitlines() if line[0] != "#"]
    told = {line.split(":")[0] for line in lines if not line.startswith("http_")}
    assert told == {"headrace", dialect}


def post(path: str, **fields: Any) -> tuple[int, Any]:
    return answer("POST", path, msgspec.json.encode(fields))


def test_tokenize_reports_the_tokens_of_a_text() -> None:
    right = {"count": 3, "max_model_len": 128, "tokens": [1, 72, 105], "token_strs": None}
    assert post("/tokenize", prompt="Hi") == (200, right)
    spelled = right | {"count": 2, "tokens": [72, 105], "token_strs": ["<72>", "<105>"]}
    plain = post("/tokenize", prompt="Hi", add_special_tokens=False, return_token_strs=True)
    assert plain == (200, spelled)


def test_tokenize_reports_the_tokens_of_a_conversation() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert bytes(post("/tokenize", messages=messages)[1]["tokens"]) == b"Hi:"
    admin_requests = {"add_generation_prompt": False, "chat_template_kwargs": {"tail": "!"}}
    assert bytes(post("/tokenize", messages=messages, **admin_requests)[1]["tokens"]) == b"Hi!"
    special = post("/tokenize", messages=messages, add_special_tokens=True)[1]
    assert special["tokens"] == [1, *b"Hi:"]


def test_detokenize_is_the_way_back() -> None:
    assert post("/detokenize", tokens=[72, 105]) == (200, {"prompt": "Hi"})


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        ("/tokenize", {}, "prompt: there must be either 'prompt' or 'messages'"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user"}]}, "prompt: there must be"),
        ("/tokenize", {"prompt": 5}, "prompt: "),
        ("/tokenize", {"prompt": "x", "model": "y"}, "the model 'y' does not exist"),
        ("/detokenize", {"tokens": [256]}, "tokens: 256 is not a token id; they go from 0 to 255"),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0]: must be an integer, not a string"),
    ],
)
def test_bad_texts_and_tokens_are_refused(path: str, fields: dict[str, Any], says: str) -> None:
    status, body = post(path, **fields)
    assert status in (400, 404)
    assert body["error"]["message"].startswith(says)
