"""A body becomes the texts to embed."""

import json
from typing import Any

import msgspec
import pytest
from byte_encoder import FramedEncoder
from planners import HTTP, ID, LongTokens, make_planner

from headrace.errors import ContextLengthExceeded, InvalidValue, RequestError
from headrace.ipc.messages import EmbeddingPlan, SimilarityPlan
from headrace.tokenizer_proc.jobs.stages import Sequences


def embedding(**fields: Any) -> Sequences:
    body = json.dumps({"input": "Hi"} | fields).encode()
    return make_planner(max_model_len=8, embeds=True).plan("embedding", HTTP, body)


def test_each_text_is_embedded_by_a_sequence() -> None:
    sequences = embedding(input=["Hi", "you"], encoding_format="base64", dimensions=2)
    assert [prompt.tolist() for prompt in sequences.prompts] == [[1, *b"Hi"], [1, *b"you"]]
    assert [(r.id, r.embeds, r.max_tokens) for r in sequences.requests] == [
        (ID, True, 1),
        (ID + 1, True, 1),
    ]
    plan = msgspec.msgpack.decode(sequences.requests[1].plan, type=EmbeddingPlan)
    assert plan == EmbeddingPlan("tiny", 2, 4, 1, True, 2)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"input": ""}, None),
        ({"input": [[]]}, "input: must have at least one token"),
        ({"input": [300]}, "input: 300 is not a token id"),
        (
            {"input": "too long a text"},
            "this model's maximum context length is 8 tokens; the input",
        ),
        ({"dimensions": 5}, "dimensions: must be between 1 and 4, not 5"),
        ({"input": ["x"] * 2049}, "input: must have at most 2048 entries, not 2049"),
        ({"model": "other"}, "the model 'other'"),
    ],
)
def test_an_embedding_that_cannot_be_is_refused(fields: dict[str, Any], says: str | None) -> None:
    if says is None:  # a text of nothing but special tokens has an embedding
        assert embedding(**fields).prompts[0].tolist() == [1]
        return
    with pytest.raises(RequestError) as refused:
        embedding(**fields)
    assert str(refused.value).startswith(says)


def test_a_long_text_may_be_cut() -> None:
    cut = embedding(input="a long text", truncate_prompt_tokens=4)
    assert cut.prompts[0].tolist() == [1, *b"a l"]
    assert len(embedding(input="a long text", truncate_prompt_tokens=-1).prompts[0]) == 8


def test_a_text_that_is_cut_keeps_the_token_that_ends_it() -> None:
    planner = make_planner(max_model_len=8, embeds=True, encoder=FramedEncoder())
    body = json.dumps({"input": "a long text", "truncate_prompt_tokens": 4}).encode()
    assert planner.plan("embedding", HTTP, body).prompts[0].tolist() == [1, *b"a ", 2]


def cohere(kind: str = "cohere_embed", **fields: Any) -> Sequences:
    planner = make_planner(max_model_len=8, embeds=True, encoder=FramedEncoder())
    return planner.plan(kind, HTTP, json.dumps(fields).encode())


def test_cohere_texts_are_embedded_in_the_types_it_names() -> None:
    sequences = cohere(texts=["Hi", "you"], embedding_types=["int8", "float"], output_dimension=2)
    plan = msgspec.msgpack.decode(sequences.requests[1].plan, type=EmbeddingPlan)
    assert (plan.types, plan.cohere, plan.dimensions) == (["int8", "float"], 2, 2)
    assert (plan.index, plan.num_sequences, plan.text) == (1, 2, "you")
    assert plan.response_id.startswith("embed-")
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    (prompt,) = cohere(inputs=[{"content": parts}]).prompts
    assert prompt.tolist() == [1, *b"Hi", 2]


@pytest.mark.parametrize(
    ("prompts", "kind", "written"),
    [
        ({"query": "q:"}, "search_query", b"q:Hi"),
        ({"passage": "p:", "query": "q:"}, "search_document", b"p:Hi"),
        ({"clustering": "c:"}, "clustering", b"c:Hi"),
        ({"query": "q:"}, "classification", b"Hi"),
        ({"query": "q:"}, None, b"Hi"),
    ],
)
def test_cohere_input_type_chooses_a_prompt(
    prompts: dict[str, str], kind: str | None, written: bytes
) -> None:
    planner = make_planner(max_model_len=8, embeds=True, prompts=prompts)
    body = json.dumps({"texts": ["Hi"], "input_type": kind}).encode()
    sequences = planner.plan("cohere_embed", HTTP, body)
    assert sequences.prompts[0].tolist() == [1, *written]
    plan = msgspec.msgpack.decode(sequences.requests[0].plan, type=EmbeddingPlan)
    assert plan.text == "Hi"  # as it came


def test_cohere_says_which_end_of_a_text_is_cut() -> None:
    for truncate, expected in (("END", b"a long"), ("START", b"g text")):
        (prompt,) = cohere(texts=["a long text"], truncate=truncate).prompts
        assert prompt.tolist() == [1, *expected, 2]
    (prompt,) = cohere(texts=["a long text"], max_tokens=4).prompts
    assert prompt.tolist() == [1, *b"a ", 2]
    with pytest.raises(RequestError, match="maximum context length") as refused:
        cohere(texts=["a long text"], truncate="NONE")
    assert refused.value.param == "texts"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "texts: there must be either 'texts' or 'inputs'"),
        ({"texts": []}, "texts: must not be empty"),
        ({"texts": ["x"], "images": ["data:"]}, "images: no model here embeds images"),
        ({"inputs": [{"content": [{"type": "image_url"}]}]}, "inputs: no model here embeds images"),
        ({"texts": ["x"], "output_dimension": 5}, "output_dimension: must be between 1 and 4"),
        ({"texts": ["x"], "embedding_types": []}, "embedding_types: must not be empty"),
    ],
)
def test_what_cohere_does_not_take_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as refused:
        cohere(**fields)
    assert str(refused.value).startswith(says)


def test_cohere_documents_are_cut_and_not_returned() -> None:
    documents = ["a long text", "b"]
    ranked = cohere("cohere_rerank", query="q", documents=documents, max_tokens_per_doc=4)
    assert [prompt.tolist() for prompt in ranked.prompts] == [
        [1, *b"q", 2],
        [1, *b"a ", 2],
        [1, *b"b", 2],
    ]
    plan = msgspec.msgpack.decode(ranked.requests[1].plan, type=SimilarityPlan)
    assert (plan.is_cohere, plan.ranks, plan.document) == (True, True, None)


def test_cohere_documents_are_returned_where_they_are_asked_for() -> None:
    ranked = cohere("cohere_rerank", query="q", documents=["a"], return_documents=True)
    plan = msgspec.msgpack.decode(ranked.requests[1].plan, type=SimilarityPlan)
    assert (plan.is_cohere, plan.document) == (True, "a")


@pytest.mark.parametrize(("kind", "document"), [("rerank", "a"), ("cohere_rerank", None)])
def test_documents_of_null_are_returned_by_default(kind: str, document: str | None) -> None:
    ranked = cohere(kind, query="q", documents=["a"], return_documents=None)
    plan = msgspec.msgpack.decode(ranked.requests[1].plan, type=SimilarityPlan)
    assert plan.document == document


@pytest.mark.parametrize("kind", ["rerank", "cohere_rerank"])
def test_any_number_of_chunks_is_taken(kind: str) -> None:
    body = {"query": "q", "documents": ["a text"]}
    for most in (1, 10):
        prompts = cohere(kind, **body, max_chunks_per_doc=most).prompts
        assert prompts[1].tolist() == [1, *b"a text", 2]
    with pytest.raises(RequestError, match="max_chunks_per_doc: must be at least 1") as refused:
        cohere(kind, **body, max_chunks_per_doc=0)
    assert refused.value.param == "max_chunks_per_doc"


def test_fields_to_rank_by_are_those_of_objects() -> None:
    fields = ["title", "text"]
    for kind in ("rerank", "cohere_rerank"):
        assert cohere(kind, query="q", documents=["a"], rank_fields=fields).prompts
    wrapped = {"query": "q", "documents": ["a", {"text": "b"}]}
    assert cohere("rerank", **wrapped, rank_fields=["text"]).prompts
    with pytest.raises(RequestError, match="rank_fields: a document is ranked by its 'text'") as no:
        cohere("rerank", **wrapped, rank_fields=fields)
    assert no.value.param == "rank_fields"


def test_jina_texts_may_be_wrapped_and_truncated() -> None:
    wrapped = embedding(input=[{"text": "a long text"}], truncate=True, embedding_type="ubinary")
    assert wrapped.prompts[0].tolist() == [1, *b"a long "]
    plan = msgspec.msgpack.decode(wrapped.requests[0].plan, type=EmbeddingPlan)
    assert plan.types == ["ubinary"]
    assert embedding(embedding_type=["binary"]).requests[0].plan == (
        embedding(embedding_type="binary").requests[0].plan
    )


@pytest.mark.parametrize(
    ("prompts", "task", "written"),
    [
        ({"retrieval.query": "r:", "query": "q:"}, "retrieval.query", b"r:Hi"),
        ({"query": "q:", "document": "d:"}, "retrieval.query", b"q:Hi"),
        ({"query": "q:", "document": "d:"}, "retrieval.passage", b"d:Hi"),
        ({"nl2code_query": "n:", "query": "q:"}, "nl2code.query", b"n:Hi"),
        ({"nl2code_document": "c:"}, "nl2code.passage", b"c:Hi"),
        ({"text-matching": ""}, "text-matching", b"Hi"),
        ({"query": "q:"}, None, b"Hi"),
    ],
)
def test_jina_task_chooses_a_prompt(
    prompts: dict[str, str], task: str | None, written: bytes
) -> None:
    planner = make_planner(max_model_len=8, embeds=True, prompts=prompts)
    body = json.dumps({"input": "Hi", "task": task}).encode()
    assert planner.plan("embedding", HTTP, body).prompts[0].tolist() == [1, *written]


def test_jina_task_with_a_prompt_takes_no_token_ids() -> None:
    planner = make_planner(max_model_len=8, embeds=True, prompts={"query": "q:", "plain": ""})
    body = {"input": [[1, 2]], "task": "retrieval.query"}
    with pytest.raises(InvalidValue, match=r"task: .* an input is token ids") as refused:
        planner.plan("embedding", HTTP, json.dumps(body).encode())
    assert refused.value.param == "task"
    body["task"] = "plain"
    assert planner.plan("embedding", HTTP, json.dumps(body).encode()).prompts[0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"late_chunking": True}, "late_chunking: each text is embedded by itself"),
        ({"return_multivector": True}, "return_multivector: a text has one vector"),
        ({"truncate_dim": 3}, "truncate_dim: use dimensions: 3"),
        ({"embedding_type": ["float", "binary"]}, "embedding_type: must be one type"),
        ({"embedding_type": []}, "embedding_type: must be one type"),
        ({"task": "code.query"}, "task: the model has no prompt for 'code.query'; .*: none"),
    ],
)
def test_what_jina_does_not_take_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        embedding(**fields)


def test_embedding_that_cannot_fit_is_refused_unencoded() -> None:
    planner = make_planner(max_model_len=8, embeds=True, encoder=LongTokens())
    stages = planner.embedding.embedding(HTTP, b'{"input": "' + b"a" * 33 + b'"}')
    with pytest.raises(ContextLengthExceeded, match=r"the input has at least 9$"):
        next(stages)
    assert next(planner.embedding.embedding(HTTP, b'{"input": "' + b"a" * 32 + b'"}'))


def compare(kind: str, **fields: Any) -> Sequences:
    planner = make_planner(max_model_len=8, embeds=True)
    return planner.plan(kind, HTTP, json.dumps(fields).encode())


def similarity_plans(sequences: Sequences) -> list[SimilarityPlan]:
    assert all(request.embeds for request in sequences.requests)
    return [msgspec.msgpack.decode(r.plan, type=SimilarityPlan) for r in sequences.requests]


def test_a_query_and_its_documents_are_sequences_of_one_request() -> None:
    sequences = compare("rerank", query={"text": "q"}, documents=["a", {"text": "bc"}], top_n=1)
    assert [bytes(prompt.tolist()[1:]) for prompt in sequences.prompts] == [b"q", b"a", b"bc"]
    plans = similarity_plans(sequences)
    assert [plan.document for plan in plans] == [None, "a", "bc"]
    assert [plan.index for plan in plans] == [0, 1, 2]
    assert [plan.num_prompt_tokens for plan in plans] == [2, 2, 3]
    assert {(p.num_sequences, p.num_queries, p.ranks, p.top_n) for p in plans} == {(3, 1, True, 1)}


def test_documents_that_are_not_wanted_do_not_travel() -> None:
    plans = similarity_plans(compare("rerank", query="q", documents=["a"], return_documents=False))
    assert [plan.document for plan in plans] == [None, None]


def test_scored_texts_are_one_to_many_or_in_pairs() -> None:
    one = compare("score", text_1="q", text_2=["a", "b"])
    assert [(p.num_queries, p.num_sequences) for p in similarity_plans(one)] == [(1, 3)] * 3
    pairs = compare("score", text_1=["p", "q"], text_2=["a", "b"])
    assert [bytes(prompt.tolist()[1:]) for prompt in pairs.prompts] == [b"p", b"q", b"a", b"b"]
    assert {(p.num_queries, p.ranks) for p in similarity_plans(pairs)} == {(2, False)}


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        ("rerank", {"documents": ["a"]}, "query: is required"),
        ("rerank", {"query": "q", "documents": []}, "documents: must not be empty"),
        ("rerank", {"query": "q", "documents": ["x"] * 2048}, "documents: must have at most 2047"),
        ("rerank", {"query": "q", "documents": ["a"], "top_n": -1}, "top_n: must be at least 0"),
        ("rerank", {"query": "a query", "documents": ["much too long"]}, "this model's maximum"),
        ("score", {"text_1": [], "text_2": "a"}, "text_1: must not be empty"),
        (
            "score",
            {"text_1": ["p", "q"], "text_2": ["a", "b", "c"]},
            "text_1: must have one text, or as many as text_2, 3, not 2",
        ),
        ("score", {"text_1": "a", "text_2": "b", "model": "other"}, "the model 'other'"),
    ],
)
def test_a_comparison_that_cannot_be_is_refused(
    kind: str, fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(RequestError) as caught:
        compare(kind, **fields)
    assert str(caught.value).startswith(says)


PAIR_TEMPLATE = (
    "{% set query = messages | selectattr('role', 'eq', 'query') | first %}"
    "{% set document = messages | selectattr('role', 'eq', 'document') | first %}"
    "Q{{ query.content }}D{{ document.content }}:"
)


def prompted(**fields: Any) -> Sequences:
    planner = make_planner(max_model_len=16, compares=True, chat_template=PAIR_TEMPLATE)
    body = {"query": "sea", "documents": ["ocean", "tax"]} | fields
    return planner.plan("rerank", HTTP, json.dumps(body).encode())


def test_a_reranker_is_prompted_by_its_own_template() -> None:
    prompts = [bytes(prompt.tolist()) for prompt in prompted().prompts]
    assert [prompt.removeprefix(b"\x01") for prompt in prompts] == [b"QseaDocean:", b"QseaDtax:"]
    assert not any(request.second_text for request in prompted().requests)


def test_a_prompted_document_is_cut_before_the_prompt_s_end() -> None:
    cut = prompted(documents=["a long text of the sea"], truncate_prompt_tokens=10)
    assert bytes(cut.prompts[0].tolist()).removeprefix(b"\x01") in (b"QseaDa lo:", b"QseaDa l:")


def test_a_prompted_document_that_is_too_long_is_refused() -> None:
    with pytest.raises(ContextLengthExceeded):
        prompted(documents=["a long text of the sea"])
