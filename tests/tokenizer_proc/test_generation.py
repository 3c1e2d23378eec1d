"""A body becomes the sequences it asks for."""

import json
from array import array
from typing import Any

import msgspec
import pytest

from headrace.config import ModelCard
from headrace.errors import ContextLengthExceeded, InvalidValue, ModelNotFound
from headrace.messages import GenerateRequest, HttpRequest, ReplyPlan, request_id
from headrace.tokenizer_proc.generation import GenerationPlanner, Sequences

ID = request_id(0, 5)
HTTP = HttpRequest(ID, "POST", "/v1/completions", 1234.75)
EOS = 2


class ByteEncoder:
    """A tokenizer whose ids are bytes, after a BOS of 1 where special tokens are wanted."""

    def encode(self, text: str, add_special_tokens: bool) -> "array[int]":
        return array("I", [1] * add_special_tokens + list(text.encode()))

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()


def make_planner(max_model_len: int = 100, num_detokenizers: int = 1) -> GenerationPlanner:
    card = ModelCard(
        path="/model",
        name="tiny",
        max_model_len=max_model_len,
        vocab_size=256,
        eos_token_ids=[EOS],
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}:",
        special_tokens={},
    )
    return GenerationPlanner(card, ByteEncoder(), num_detokenizers, seed=1000)


def chat(planner: GenerationPlanner | None = None, **fields: Any) -> Sequences:
    body = {"messages": [{"role": "user", "content": "Hi"}]} | fields
    return (planner or make_planner()).chat(HTTP, json.dumps(body).encode())


def completion(planner: GenerationPlanner | None = None, **fields: Any) -> Sequences:
    body = {"prompt": "Hi"} | fields
    return (planner or make_planner()).completion(HTTP, json.dumps(body).encode())


def only(sequences: Sequences) -> GenerateRequest:
    (request,) = sequences.requests
    return request


def plan_of(request: GenerateRequest) -> ReplyPlan:
    return msgspec.msgpack.decode(request.plan, type=ReplyPlan)


def test_a_chat_is_the_rendered_template_without_special_tokens() -> None:
    assert bytes(chat().prompts[0].tolist()) == b"Hi:"


def test_a_completion_is_the_text_with_special_tokens() -> None:
    assert completion().prompts[0].tolist() == [1, *b"Hi"]


def test_token_ids_are_taken_as_they_are() -> None:
    assert completion(prompt=[5, 6]).prompts[0].tolist() == [5, 6]


def test_defaults_are_openais() -> None:
    request = only(completion())
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1, 1, 0)
    assert request.max_tokens == 16
    assert request.stop_token_ids == [EOS]


def test_a_chat_may_fill_the_context() -> None:
    assert only(chat()).max_tokens == 100 - len(b"Hi:")


def test_the_default_of_a_completion_shrinks_to_what_is_left() -> None:
    assert only(completion(prompt=[7] * 95)).max_tokens == 5


def test_max_completion_tokens_goes_before_max_tokens() -> None:
    assert only(chat(max_tokens=7)).max_tokens == 7
    assert only(chat(max_tokens=7, max_completion_tokens=5)).max_tokens == 5


def test_the_context_can_be_filled_to_the_last_token() -> None:
    assert only(completion(prompt=[7] * 90, max_tokens=10)).max_tokens == 10


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "wish"),
    [(90, 11, "11 new ones"), (100, None, "at least one"), (101, 1, "1 new"), (1, 10**400, "new")],
)
def test_more_than_the_context_is_refused(
    num_prompt: int, max_tokens: int | None, wish: str
) -> None:
    with pytest.raises(ContextLengthExceeded, match=f"100 tokens.*{num_prompt}.*{wish}") as refused:
        completion(prompt=[7] * num_prompt, max_tokens=max_tokens)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize("prompt", [[[]], [[1], []]])
def test_a_prompt_without_tokens_is_refused(prompt: object) -> None:
    with pytest.raises(InvalidValue, match="at least one token"):
        completion(prompt=prompt)


@pytest.mark.parametrize("id", [-1, 256, 2**40])
def test_a_prompt_with_an_unknown_token_is_refused(id: int) -> None:
    with pytest.raises(InvalidValue, match=f"{id} is not a token id.*255"):
        completion(prompt=[1, id])


@pytest.mark.parametrize(("top_k", "taken"), [(-1, 0), (0, 0), (40, 40), (2**40, 256)])
def test_top_k_is_at_most_all_tokens(top_k: int, taken: int) -> None:
    assert only(completion(top_k=top_k)).sampling.top_k == taken


def test_a_negative_seed_is_one_too() -> None:
    assert only(completion(seed=-1)).sampling.seed == 2**64 - 1


def test_requests_without_seed_differ() -> None:
    other = HttpRequest(request_id(0, 6), "POST", "/v1/completions", 0)
    body = b'{"prompt": "Hi"}'
    planner = make_planner()
    seeds = [only(planner.completion(http, body)).sampling.seed for http in (HTTP, HTTP, other)]
    assert seeds[0] == seeds[1] != seeds[2]


def test_ignore_eos_leaves_only_the_requests_own_stop_tokens() -> None:
    assert only(completion(stop_token_ids=[9])).stop_token_ids == [EOS, 9]
    assert only(completion(stop_token_ids=[9], ignore_eos=True)).stop_token_ids == [9]


def test_n_sequences_share_a_prompt_and_nothing_else() -> None:
    sequences = completion(n=3, seed=10)
    assert [r.id for r in sequences.requests] == [ID, ID + 1, ID + 2]
    assert [r.sampling.seed for r in sequences.requests] == [10, 11, 12]
    assert sequences.prompts == [sequences.prompts[0]] * 3
    plans = [plan_of(r) for r in sequences.requests]
    assert [p.index for p in plans] == [0, 1, 2]
    assert [p.shares_prompt for p in plans] == [False, True, True]
    assert {p.num_sequences for p in plans} == {3}
    assert len({p.response_id for p in plans}) == 1


def test_choices_of_several_prompts_are_in_order_of_the_prompts() -> None:
    sequences = completion(prompt=["a", "bb"], n=2, echo=True)
    assert [p.tolist()[1:] for p in sequences.prompts] == [[97], [97], [98, 98], [98, 98]]
    plans = [plan_of(r) for r in sequences.requests]
    assert [p.index for p in plans] == [0, 1, 2, 3]
    assert [p.echo for p in plans] == ["a", "a", "bb", "bb"]
    assert [p.num_prompt_tokens for p in plans] == [2, 2, 3, 3]
    assert [p.shares_prompt for p in plans] == [False, True, False, True]


def test_too_many_sequences_in_one_request_are_refused() -> None:
    assert len(completion(prompt=["a"] * 64, n=2).requests) == 128
    with pytest.raises(InvalidValue, match="43 prompts x n=3") as refused:
        completion(prompt=["a"] * 43, n=3)
    assert refused.value.param == "n"


def test_echo_of_token_ids_is_their_text() -> None:
    assert plan_of(only(completion(prompt=[72, 105], echo=True))).echo == "Hi"
    assert plan_of(only(completion(prompt=[72, 105]))).echo == ""


def test_the_reply_plan_carries_what_the_reply_needs() -> None:
    request = only(
        chat(
            stream=True,
            stream_options={"include_usage": True},
            stop="x",
            include_stop_str_in_output=True,
            skip_special_tokens=False,
        )
    )
    plan = plan_of(request)
    assert plan.response_id.startswith("chatcmpl-")
    assert plan == ReplyPlan(
        response_id=plan.response_id,
        model="tiny",
        created=1234,
        chat=True,
        stream=True,
        include_usage=True,
        num_sequences=1,
        num_prompt_tokens=3,
        index=0,
        stop=["x"],
        include_stop=True,
        skip_special_tokens=False,
    )


def test_every_response_has_an_id_of_its_own() -> None:
    ids = {plan_of(only(completion())).response_id for _ in range(10)}
    assert len(ids) == 10
    assert all(id.startswith("cmpl-") for id in ids)


def test_requests_are_dealt_to_the_detokenizers_in_turn() -> None:
    planner = make_planner(num_detokenizers=3)
    https = [HttpRequest(request_id(0, i), "POST", "/v1/completions", 0) for i in range(6)]
    body = b'{"prompt": "Hi", "n": 2}'
    dealt = [{r.detokenizer for r in planner.completion(h, body).requests} for h in https]
    assert dealt == [{0}, {1}, {2}] * 2


@pytest.mark.parametrize("plan", [chat, completion])
def test_another_models_name_is_refused(plan: Any) -> None:
    plan(model="tiny")
    with pytest.raises(ModelNotFound, match="'gpt-4' does not exist; this server has 'tiny'"):
        plan(model="gpt-4")
