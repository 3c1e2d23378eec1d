"""Embedding models through the ring: the vectors are those of sentence-transformers."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import numpy.typing as npt
import openai
import pytest
import torch
import transformers
from described import answer_examples
from embedding_models import LAST, TEXTS, add_modules, minilm
from encoder_tolerance import tolerance
from examples import blocks, needs_curl, run_command, run_examples
from servers import WITHOUT_TORCH, RunningServer

import headrace.client.client
from headrace import Client, Engine
from headrace.config.model_card import find_demo_model
from headrace.model.tokenizer_json import read_tokenizer_json
from headrace.response_bodies.embeddings import Embedded

Vectors = npt.NDArray[np.float32]
RECORDED = Path(__file__).parent / "recorded"
LONG = "All happy families are alike. " * 100
VECTOR_ATOL, COSINE_ATOL = tolerance(5e-4, 3e-3), tolerance(1e-4, 1e-3)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    running = RunningServer(str(minilm()), "--served-model-name", "minilm", env=WITHOUT_TORCH)
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def expected() -> Vectors:
    from sentence_transformers import SentenceTransformer

    vectors: Vectors = SentenceTransformer(str(minilm()), device="cpu").encode(TEXTS)
    return vectors


def post(server: RunningServer, path: str = "/v1/embeddings", **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=fields)


def test_examples_of_openapi_are_answered(server: RunningServer) -> None:
    assert answer_examples(server.url) >= {
        *("/v1/embeddings", "/v1/embed", "/v2/embed", "/v1/rerank", "/v2/rerank", "/v1/score"),
    }


def test_the_official_client_gets_the_reference_s_vectors(
    server: RunningServer, expected: Vectors
) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-")
    answer = client.embeddings.create(model="minilm", input=TEXTS)
    vectors = np.array([item.embedding for item in answer.data], np.float32)
    assert [item.index for item in answer.data] == list(range(len(TEXTS)))
    assert ((vectors * expected).sum(axis=1) >= 0.9999).all()
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)


@needs_curl
@pytest.mark.parametrize("command", blocks("docs/api/embeddings.md", "sh"))
def test_the_commands_about_embeddings_work(server: RunningServer, command: str) -> None:
    answer = json.loads(run_command(command, server.url))
    assert len(answer.get("results") or answer.get("data") or answer["texts"]) == 2


def test_the_examples_of_the_client_are_true(server: RunningServer) -> None:
    with Client(server.url) as client:
        assert run_examples(headrace.client.client, embedder=client) > 2


def test_floats_and_base64_are_the_same_numbers(server: RunningServer) -> None:
    answer = post(server, input=TEXTS[0], encoding_format="float")
    floats = msgspec.json.decode(answer.content, type=Embedded).data[0].embedding
    with Client(server.url) as client:
        assert client.embed(TEXTS[0]).data[0].vector.tolist() == np.float32(floats).tolist()


def test_token_ids_have_the_vectors_of_their_texts(server: RunningServer) -> None:
    def vectors(given: Any) -> list[list[float]]:
        answer = post(server, input=given)
        assert answer.status_code == 200, answer.text
        return [one["embedding"] for one in answer.json()["data"]]

    ids = [post(server, "/tokenize", prompt=text).json()["tokens"] for text in TEXTS[:3]]
    expected = vectors(TEXTS[:3])
    assert vectors(ids) == expected
    assert vectors(ids[0]) == expected[:1]


def test_fewer_dimensions_are_the_first_ones(server: RunningServer, expected: Vectors) -> None:
    (item,) = post(server, input=TEXTS[0], dimensions=32).json()["data"]
    part = expected[0, :32] / np.linalg.norm(expected[0, :32])
    np.testing.assert_allclose(item["embedding"], part, atol=VECTOR_ATOL)


def test_what_else_is_asked_at_the_same_time_changes_nothing(
    server: RunningServer, expected: Vectors
) -> None:
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda text: post(server, input=text).json(), TEXTS * 4))
    vectors = np.array([answer["data"][0]["embedding"] for answer in answers])
    np.testing.assert_allclose(vectors, np.tile(expected, (4, 1)), atol=VECTOR_ATOL)


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        ("/v1/embeddings", {"input": LONG}, "maximum context length is 256"),
        ("/v1/embeddings", {"input": "x", "dimensions": 385}, "between 1 and 384"),
        ("/v1/embeddings", {"input": []}, "input: must not be empty"),
        ("/v1/embeddings", {"input": [30522]}, "30522 is not a token id"),
        ("/v1/embeddings", {"input": "x", "task": "no.query"}, "no prompt for 'no.query'"),
        ("/v1/rerank", {"documents": ["x"]}, "query: is required"),
        ("/v1/completions", {"prompt": "x"}, "generates no text"),
    ],
)
def test_what_cannot_be_is_refused(
    server: RunningServer, path: str, fields: dict[str, Any], says: str
) -> None:
    answer = post(server, path, **fields)
    assert answer.status_code == 400
    told = answer.json()
    assert says in told["error"]["message"]
    is_jinas = path in ("/v1/embeddings", "/v1/rerank")
    assert told.get("detail") == (told["error"]["message"] if is_jinas else None)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("POST", "/v2/embed", {"texts": ["x"], "output_dimension": 385}, 400, "between 1 and 384"),
        ("POST", "/v1/embed", {"texts": [LONG], "truncate": "NONE"}, 400, "length is 256"),
        ("POST", "/v2/rerank", {"documents": ["x"]}, 400, "query: is required"),
        ("POST", "/v2/rerank", {"query": "x", "documents": ["y"], "model": "no"}, 404, "'no'"),
        ("GET", "/v1/embed", None, 405, "takes POST, not GET"),
        ("DELETE", "/v2/embed", None, 405, "takes POST, not DELETE"),
    ],
)
def test_errors_of_coheres_paths_have_coheres_shape(
    server: RunningServer, method: str, path: str, body: Any, status: int, says: str
) -> None:
    answer = httpx.request(method, f"{server.url}{path}", json=body)
    told = answer.json()
    assert (answer.status_code, list(told)) == (status, ["message"])
    assert says in told["message"]


def test_texts_are_ranked_and_scored_by_the_reference_s_cosines(
    server: RunningServer, expected: Vectors
) -> None:
    cosines = expected[1:] @ expected[0]
    asked = {"query": TEXTS[0], "documents": TEXTS[1:]}
    ranked = post(server, "/v1/rerank", **asked, top_n=3).json()
    told = {result["index"]: result["relevance_score"] for result in ranked["results"]}
    assert list(told) == np.argsort(-cosines)[:3].tolist()
    np.testing.assert_allclose(list(told.values()), cosines[list(told)], atol=COSINE_ATOL)
    assert all(r["document"]["text"] == TEXTS[1 + r["index"]] for r in ranked["results"])
    scored = post(server, "/score", text_1=TEXTS[0], text_2=TEXTS[1:]).json()
    np.testing.assert_allclose([one["score"] for one in scored["data"]], cosines, atol=COSINE_ATOL)
    assert scored["usage"] == ranked["usage"]


def test_recorded_requests_of_vllms_benchmark(server: RunningServer) -> None:
    for one in json.loads((RECORDED / "vllm_bench_pooling.json").read_text()):
        answer = post(server, one["path"], **(one["body"] | {"model": "minilm"})).json()
        texts = one["body"].get("documents") or one["body"]["input"]
        told = answer.get("results") or answer["data"]
        assert len(told) == (1 if isinstance(texts, str) else len(texts))
        assert answer["usage"]["prompt_tokens"] > len(told)
    for limit in (-1, 256):
        answer = post(server, input=LONG, truncate_prompt_tokens=limit).json()
        assert answer["usage"]["prompt_tokens"] == 256


def test_a_decoder_s_prompt_may_take_several_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "qwen3",
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
    )
    model = transformers.AutoModel.from_config(config).eval()
    model.save_pretrained(tmp_path)
    add_modules(tmp_path, LAST, "Normalize")
    demo = find_demo_model()
    assert demo is not None
    (tmp_path / "tokenizer.json").write_bytes(read_tokenizer_json(demo))
    prompts = [[5, *range(100, 400)], [7, 8], [5, *range(100, 300)]]
    with torch.inference_mode():
        hidden = [model(torch.tensor([p])).last_hidden_state[0, -1] for p in prompts]
    expected = torch.nn.functional.normalize(torch.stack(hidden), dim=1).numpy()
    flags: dict[str, Any] = {"max_num_batched_tokens": 70, "kv_cache_dtype": "float32"}
    with Engine(tmp_path, device="cpu", **flags) as engine:
        np.testing.assert_allclose(engine.embed(prompts), expected, atol=1e-5)
