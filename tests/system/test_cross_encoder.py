"""A cross-encoder through the ring: scores are those of sentence-transformers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from described import answer_examples
from embedding_models import TEXTS, add_logit_score, make_cross_encoder
from servers import RunningServer
from tokenizers import Tokenizer

from headrace.config.model_card import find_demo_model
from headrace.model.tokenizer_json import read_tokenizer_json

QUERY, DOCUMENTS = TEXTS[0], [*TEXTS[1:], "The cat. " * 300]
PAIR_TEMPLATE = """{{ '<|im_start|>system\\nJudge.<|im_end|>\\n' }}
{%- set query = messages | selectattr("role", "eq", "query") | first %}
{%- set document = messages | selectattr("role", "eq", "document") | first %}
{{- 'Query: ' ~ query.content ~ '\\nDocument: ' ~ document.content ~ '\\n->' }}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cross-encoder")
    make_cross_encoder(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    running = RunningServer(str(folder), "--served-model-name", "ranker")
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[float]:
    from sentence_transformers import CrossEncoder

    encoder = CrossEncoder(str(folder), device="cpu", max_length=512)
    scores: list[float] = encoder.predict([(QUERY, text) for text in DOCUMENTS]).tolist()
    return scores


def post(server: RunningServer, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=fields)


def test_model_info_says_that_nothing_is_generated(server: RunningServer) -> None:
    assert httpx.get(f"{server.url}/model_info").json()["is_generation"] is False


def test_examples_of_openapi_are_answered(server: RunningServer) -> None:
    assert answer_examples(server.url) >= {"/v1/rerank", "/v1/score"}


def test_scores_are_the_reference_s(server: RunningServer, expected: list[float]) -> None:
    answer = post(
        server, "/v1/score", text_1=QUERY, text_2=DOCUMENTS, truncate_prompt_tokens=512
    ).json()
    scores = [one["score"] for one in answer["data"]]
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    assert max(scores) - min(scores) > 0.01
    assert answer["usage"]["prompt_tokens"] > 512


def test_documents_are_ranked_by_their_scores(server: RunningServer, expected: list[float]) -> None:
    asked = {"query": QUERY, "documents": DOCUMENTS, "truncate_prompt_tokens": 512}
    results = post(server, "/v1/rerank", **asked, top_n=3).json()["results"]
    assert [one["index"] for one in results] == np.argsort(expected)[::-1][:3].tolist()
    assert [one["document"]["text"] for one in results] == [
        DOCUMENTS[one["index"]] for one in results
    ]


def test_texts_in_pairs_are_scored_in_pairs(server: RunningServer, expected: list[float]) -> None:
    pairs = {"text_1": [QUERY] * 2, "text_2": DOCUMENTS[:2]}
    data = post(server, "/v1/score", **pairs).json()["data"]
    np.testing.assert_allclose([one["score"] for one in data], expected[:2], atol=1e-4)


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        ("/v1/embeddings", {"input": "x"}, "'ranker' compares texts; see /v1/rerank"),
        ("/v1/completions", {"prompt": "x"}, "'ranker' compares texts; see /v1/rerank"),
        ("/v1/score", {"text_1": "x", "text_2": DOCUMENTS[-1]}, "maximum context length is 512"),
    ],
)
def test_what_cannot_be_is_refused(
    server: RunningServer, path: str, fields: dict[str, Any], says: str
) -> None:
    answer = post(server, path, **fields)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_a_reranker_s_own_template_prompts_it(tmp_path: Path) -> None:
    """As Qwen3-Reranker is published: a decoder, a template of pairs, and two tokens."""
    torch.manual_seed(0)
    demo = find_demo_model()
    assert demo is not None
    (tmp_path / "tokenizer.json").write_bytes(read_tokenizer_json(demo))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text(PAIR_TEMPLATE)
    sizes = {"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 49152}
    config = transformers.AutoConfig.for_model("qwen3", **sizes, **heads)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    add_logit_score(tmp_path, yes=9531, no=787)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    expected = []
    for document in DOCUMENTS:
        prompt = f"<|im_start|>system\nJudge.<|im_end|>\nQuery: {QUERY}\nDocument: {document}\n->"
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        expected.append(float(torch.sigmoid(logits[9531] - logits[787])))
    server = RunningServer(str(tmp_path), "--served-model-name", "ranker")
    ranked = post(server, "/v1/rerank", query=QUERY, documents=DOCUMENTS)
    scored = post(server, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)
    assert server.stop() == 0
    assert ranked.status_code == scored.status_code == 200, ranked.text
    np.testing.assert_allclose([one["score"] for one in scored.json()["data"]], expected, atol=1e-3)
    by_score = sorted(range(len(expected)), key=lambda index: -expected[index])
    assert [one["index"] for one in ranked.json()["results"]] == by_score
    assert max(expected) - min(expected) > 0.01
