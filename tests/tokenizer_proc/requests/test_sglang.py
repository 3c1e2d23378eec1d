"""A request of `/generate` comes to continuations, and errors name what its client wrote."""

import json
from typing import Any

import msgspec
import pytest
from planners import HTTP, ID, make_planner

from headrace.errors import RequestError
from headrace.ipc.messages import Api, GenerateForm, ResponsePlan
from headrace.tokenizer_proc.jobs.stages import Sequences
from headrace.tokenizer_proc.requests import sglang


def planned(**fields: Any) -> Sequences:
    return make_planner().plan("generate", HTTP, json.dumps(fields).encode())


def plans_of(sequences: Sequences) -> list[ResponsePlan]:
    return [msgspec.msgpack.decode(r.plan, type=ResponsePlan) for r in sequences.requests]


def form_of(sequences: Sequences) -> GenerateForm:
    forms = [plan.form for plan in plans_of(sequences)]
    assert isinstance(forms[0], GenerateForm)
    assert forms == [forms[0]] * len(forms)
    return forms[0]


def test_a_text_is_continued() -> None:
    assert planned(text="Hi", rid="").requests, "an empty one is none"
    sequences = planned(text="Hi", rid="mine")
    (request,), (plan,) = sequences.requests, plans_of(sequences)
    assert bytes(sequences.prompts[0].tolist()) == b"\x01Hi"
    assert request.max_tokens == 97, "SGLang's default, 128, or what fits"
    assert (plan.api, plan.response_id, plan.return_token_ids) == (Api.GENERATE, "mine", True)
    assert form_of(sequences) == GenerateForm(False, HTTP.received_at, [], 1, False, [None], [None])


def test_empty_rid_is_none() -> None:
    (plan,) = plans_of(planned(text="Hi", rid=""))
    assert len(plan.response_id) >= 16


def test_parameters_are_called_as_with_sglang() -> None:
    params = {
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "no_stop_trim": True,
        "stop": "x",
        "stop_token_ids": [7],
        "temperature": 0.5,
        "top_k": 3,
        "repetition_penalty": 1.5,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    sequences = planned(input_ids=[5, 6], sampling_params=params)
    (request,), (plan,) = sequences.requests, plans_of(sequences)
    assert sequences.prompts[0].tolist() == [5, 6]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (0.5, 3, 1.5)
    assert (request.max_tokens, sampling.min_tokens, request.stop_token_ids) == (9, 2, [7])
    assert (plan.stop, plan.include_stop, plan.skip_special_tokens) == (["x"], True, False)


def test_each_prompt_may_have_parameters_of_its_own() -> None:
    params = [{"max_new_tokens": 3, "n": 2, "stop": "a"}, {"max_new_tokens": 4, "n": 2}]
    sequences = planned(text=["x", "yy"], sampling_params=params, rid=["p", "q"])
    requests, plans = sequences.requests, plans_of(sequences)
    assert [r.id for r in requests] == [ID, ID + 1, ID + 2, ID + 3]
    assert [r.max_tokens for r in requests] == [3, 3, 4, 4]
    assert [len(prompt) for prompt in sequences.prompts] == [2, 2, 3, 3]
    assert [plan.index for plan in plans] == [0, 1, 2, 3]
    assert [plan.stop for plan in plans] == [["a"], ["a"], [], []]
    assert {plan.num_sequences for plan in plans} == {4}
    form = form_of(sequences)
    assert (form.is_list, form.ids, form.num_each) == (True, ["p", "q"], 2)


@pytest.mark.parametrize(
    ("fields", "is_list"),
    [
        ({"text": ["x"]}, True),
        ({"input_ids": [[1]]}, True),
        ({"text": "x", "sampling_params": {"n": 2}}, True),
        ({"input_ids": [1]}, False),
    ],
)
def test_an_answer_is_a_list_where_there_may_be_several(
    fields: dict[str, Any], is_list: bool
) -> None:
    assert form_of(planned(**fields)).is_list == is_list


def test_prompt_logprobs_begin_where_they_are_requested() -> None:
    admin_requests: list[dict[str, Any]] = [
        {},
        {"return_logprob": True, "top_logprobs_num": 2},
        {"return_logprob": True, "logprob_start_len": 0},
        {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 2},
        {"return_logprob": False, "logprob_start_len": 0, "top_logprobs_num": 2},
    ]
    found = []
    for admin_request in admin_requests:
        sequences = planned(text="Hi", **admin_request)
        sampling, form = sequences.requests[0].sampling, form_of(sequences)
        assert form.num_logprobs == [sampling.logprobs]
        found.append((sampling.logprobs, sampling.prompt_logprobs, *form.first_logprob))
    assert found == [(None, None, None), (2, None, None), (0, 0, 0), (2, 2, 1), (None, None, None)]


def test_each_prompt_may_have_log_probabilities_of_its_own() -> None:
    sequences = planned(
        input_ids=[[1], [2], [3]],
        sampling_params={"n": 2, "max_new_tokens": 4},
        return_logprob=[True, False, True],
        logprob_start_len=[0, 0, -1],
        top_logprobs_num=[3, 2, 1],
    )
    sampling = [(r.sampling.logprobs, r.sampling.prompt_logprobs) for r in sequences.requests]
    assert sampling == [(3, 3)] * 2 + [(None, None)] * 2 + [(1, None)] * 2
    assert [r.max_tokens for r in sequences.requests] == [4] * 6
    form = form_of(sequences)
    assert (form.num_logprobs, form.first_logprob) == ([3, None, 1], [0, None, None])
    alike = form_of(planned(text=["x", "y"], return_logprob=[True, True], top_logprobs_num=2))
    assert (alike.num_logprobs, alike.first_logprob) == ([2, 2], [None, None])


def test_a_prompt_may_only_be_scored() -> None:
    sequences = planned(text="Hi", sampling_params={"max_new_tokens": 0}, return_logprob=True)
    assert sequences.requests[0].max_tokens == 0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "text: there must be either 'text' or 'input_ids'"),
        ({"text": "x", "input_ids": [1]}, "text: there must be either 'text' or 'input_ids'"),
        ({"text": []}, "text: must not be empty"),
        ({"text": [], "sampling_params": []}, "text: must not be empty"),
        ({"input_ids": []}, "input_ids: must not be empty"),
        ({"input_ids": [[]]}, "input_ids: must have at least one token"),
        ({"input_ids": [1, [2]]}, "input_ids: must be a list of token ids, or a list of lists"),
        ({"input_ids": [256]}, "input_ids: 256 is not a token id"),
        ({"text": ["x"] * 129}, "text: 129 prompts is more than 128"),
        ({"text": ["x"] * 65, "sampling_params": {"n": 2}}, "text: 65 prompts x 2 is more"),
        ({"text": "x" * 200}, "this model's maximum context length is 100 tokens; the text"),
        ({"text": "x", "rid": ["a"]}, "rid: must be one, or a list with one for each prompt"),
        ({"text": "x", "rid": "a" * 129}, "rid: must have at most 128"),
        ({"text": ["x", "y"], "sampling_params": [{}]}, "sampling_params: must be one, or a list"),
        ({"text": ["x"] * 2, "sampling_params": [{}, {"n": 2}]}, "sampling_params: must have the"),
        ({"text": "x", "image_data": "y"}, "image_data: not supported by this server"),
        ({"text": "x", "top_logprobs_num": 21}, "top_logprobs_num: must be between 0 and 20"),
        ({"text": ["x"], "top_logprobs_num": [21]}, "top_logprobs_num: must be between 0 and 20"),
        ({"text": "x", "return_logprob": [True]}, "return_logprob: must be one, or a list with"),
        ({"text": ["x"], "logprob_start_len": [0, 1]}, "logprob_start_len: must be one, or a"),
        (
            {"text": "x", "return_logprob": True, "logprob_start_len": 0, "stream": True},
            "logprob_start_len: not available with 'stream': true",
        ),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as refused:
        planned(**fields)
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"max_new_tokens": -1}, ".max_new_tokens: must be at least 0, not -1"),
        ({"temperature": -1}, ".temperature: must be at least 0, not -1"),
        ({"stop": [""]}, ".stop: must be at most 32 strings"),
        ({"stop_token_ids": [300]}, ".stop_token_ids: 300 is not a token id"),
        ({"min_new_tokens": 3, "max_new_tokens": 2}, ".min_new_tokens: must be at most"),
        ({"stop_regex": "x"}, ".stop_regex: not supported"),
    ],
)
def test_a_parameter_is_refused_by_the_name_it_was_given(params: dict[str, Any], says: str) -> None:
    for given, where in ((params, "sampling_params"), ([params], "sampling_params[0]")):
        with pytest.raises(RequestError) as refused:
            planned(text=["x"], sampling_params=given)
        assert str(refused.value).startswith(where + says)
        assert refused.value.param == where + says.split(":")[0]


@pytest.mark.parametrize("name", ["json_schema", "regex", "ebnf", "structural_tag"])
def test_each_prompt_may_have_a_form_of_its_own(name: str) -> None:
    sequences = planned(text=["x", "y"], sampling_params=[{name: "a"}, {}])
    assert [r.grammar for r in sequences.requests] == [f"{name}: a".encode(), b""]


def test_too_many_prompts_are_refused_unmade(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sglang, "continuations")  # a million took gigabytes
    with pytest.raises(RequestError, match="200 prompts is more than 128 sequences"):
        planned(text=["x"] * 200, return_logprob=[False] * 200)
