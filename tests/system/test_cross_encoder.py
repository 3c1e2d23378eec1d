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
from encoder_tolerance import tolerance
from servers import RunningServer
from tokenizers import Tokenizer

from headrace.config.model_card import find_demo_model
from headrace.model.tokenizer_json import read_tokenizer_json

QUERY, DOCUMENTS = TEXTS[0], [*TEXTS[1:], "The cat. " * 300]
PAIR_TEMPLATE = """{{ '<|im_start|>system\\nJudge.<|im_end|>\\n' }}
{%- set query = messages | selectattr("role", "eq", "query") | first %}
{%- set document = messages | selectattr("role", "eq", "document") | first %}
{{- 'Query: ' ~ query.content ~ '\\nDocument: ' ~ document.content ~ '\\n->' }}"""

BOS = "<|endoftext|>"
SCORE_ATOL = tolerance(1e-3, 2e-3)
QWEN_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
    "answer the query\n<Query>: {query}\n<Document>: |DOCUMENT|<|im_end|>\n<|im_start|>assistant\n"
    "<think>\n\n</think>\n\n"
)
GEMMA_PROMPT = (
    BOS + "A: {query}\nB: |DOCUMENT|\nGiven a query A and a passage B, determine whether the "
    "passage contains an answer to the query by providing a prediction of either 'Yes' or 'No'."
)


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


class Reranker:
    """A random decoder on disk, with the demo model's tokenizer, as rerankers are published."""

    def __init__(self, folder: Path, kind: str) -> None:
        torch.manual_seed(0)
        demo = find_demo_model()
        assert demo is not None
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_bytes(read_tokenizer_json(demo))
        settings = {"bos_token": BOS, "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        sizes = {"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 16}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 49152}
        config = transformers.AutoConfig.for_model(kind, **sizes, **heads, initializer_range=0.1)
        auto_class = transformers.AutoModelForCausalLM
        self._model = auto_class.from_config(config, dtype=torch.float32).eval()
        self._model.save_pretrained(folder)
        self.folder = folder
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def id(self, token: str) -> int:
        """Return the id of a token."""
        found: int | None = self._tokenizer.token_to_id(token)
        assert found is not None
        return found

    def score(self, prompt: str, yes: str, no: str = "") -> float:
        """Return what transformers makes of a prompt."""
        ids = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        with torch.inference_mode():
            logits = self._model(torch.tensor([ids])).logits[0, -1]
        against = logits[self.id(no)] if no else 0
        return float(torch.sigmoid(logits[self.id(yes)] - against))


def check_scores(server: RunningServer, expected: list[float], model: str = "ranker") -> None:
    """Check both routes' scores of all documents."""
    ranked = post(server, "/v1/rerank", model=model, query=QUERY, documents=DOCUMENTS)
    scored = post(server, "/v1/score", model=model, text_1=QUERY, text_2=DOCUMENTS)
    assert ranked.status_code == scored.status_code == 200, ranked.text
    np.testing.assert_allclose(
        [one["score"] for one in scored.json()["data"]], expected, atol=SCORE_ATOL
    )
    results = ranked.json()["results"]
    by_score = sorted(range(len(expected)), key=lambda index: -expected[index])
    assert [one["index"] for one in results] == by_score
    told = [one["relevance_score"] for one in results]
    np.testing.assert_allclose(told, [expected[index] for index in by_score], atol=SCORE_ATOL)
    assert max(expected) - min(expected) > 0.01


def test_a_reranker_s_own_template_prompts_it(tmp_path: Path) -> None:
    """As Qwen3-Reranker is published with its module: a template of pairs, and two tokens."""
    reranker = Reranker(tmp_path, "qwen3")
    (tmp_path / "chat_template.jinja").write_text(PAIR_TEMPLATE)
    add_logit_score(tmp_path, yes=reranker.id("yes"), no=reranker.id("no"))
    begin = f"<|im_start|>system\nJudge.<|im_end|>\nQuery: {QUERY}\nDocument: "
    expected = [reranker.score(f"{begin}{text}\n->", "yes", "no") for text in DOCUMENTS]
    server = RunningServer(str(tmp_path), "--served-model-name", "ranker")
    check_scores(server, expected)
    assert server.stop() == 0


def test_rerankers_as_published_score_by_the_tokens_of_a_flag(tmp_path: Path) -> None:
    """Folders that generate, without a module or a template of pairs."""
    qwen, gemma = Reranker(tmp_path / "qwen", "qwen3"), Reranker(tmp_path / "gemma", "gemma")
    models = [
        {
            "model": str(qwen.folder),
            "hf_overrides": {
                "architectures": ["Qwen3ForSequenceClassification"],
                "classifier_from_token": ["no", "yes"],
                "is_original_qwen3_reranker": True,
            },
        },
        {
            "model": str(gemma.folder),
            "hf_overrides": {
                "architectures": ["GemmaForSequenceClassification"],
                "classifier_from_token": ["Yes"],
                "method": "no_post_processing",
            },
        },
    ]
    (tmp_path / "flags.yaml").write_text(json.dumps({"models": models}))  # JSON is YAML
    exact = ("--dtype", "float32", "--kv-cache-dtype", "float32")
    server = RunningServer("--config", str(tmp_path / "flags.yaml"), *exact)
    begin, end = QWEN_PROMPT.format(query=QUERY).split("|DOCUMENT|")
    expected = [qwen.score(begin + text + end, "yes", "no") for text in DOCUMENTS]
    check_scores(server, expected, "qwen")
    begin, end = GEMMA_PROMPT.format(query=QUERY).split("|DOCUMENT|")
    expected = [gemma.score(begin + text + end, "Yes") for text in DOCUMENTS]
    check_scores(server, expected, "gemma")
    assert server.stop() == 0
