"""A body becomes the sequences it asks for."""

import json
from typing import Any

import msgspec
import pytest
from planners import EOS, HTTP, ID, LongTokens, Planner, make_planner

from headrace.errors import (
    ContextLengthExceeded,
    InvalidValue,
    ModelNotFound,
    Unsupported,
    WrongKind,
)
from headrace.ipc.inflight import InflightRequest
from headrace.ipc.messages import (
    Api,
    GenerateRequest,
    HttpRequest,
    ResponsePlan,
    Sampling,
    request_id,
)
from headrace.model.sampling_defaults import SamplingDefaults
from headrace.tokenizer_proc import logprob_limit
from headrace.tokenizer_proc.jobs.stages import Sequences


def chat(planner: Planner | None = None, **fields: Any) -> Sequences:
    body = {"messages": [{"role": "user", "content": "Hi"}]} | fields
    return (planner or make_planner()).plan("chat", HTTP, json.dumps(body).encode())


def completion(planner: Planner | None = None, **fields: Any) -> Sequences:
    body = {"prompt": "Hi"} | fields
    return (planner or make_planner()).plan("completion", HTTP, json.dumps(body).encode())


def only(sequences: Sequences) -> GenerateRequest:
    (request,) = sequences.requests
    return request


def plan_of(request: GenerateRequest) -> ResponsePlan:
    return msgspec.msgpack.decode(request.plan, type=ResponsePlan)


def test_a_chat_is_the_rendered_template_without_special_tokens() -> None:
    assert bytes(chat().prompts[0].tolist()) == b"Hi:"


def test_a_completion_is_the_text_with_special_tokens() -> None:
    assert completion().prompts[0].tolist() == [1, *b"Hi"]


def test_special_tokens_may_be_wanted_or_not() -> None:
    assert chat(add_special_tokens=True).prompts[0].tolist() == [1, *b"Hi:"]
    assert completion(add_special_tokens=False).prompts[0].tolist() == [*b"Hi"]


@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
def test_a_stop_string_is_returned_on_request_by_either_name(name: str) -> None:
    assert plan_of(only(chat(**{name: True}))).include_stop
    assert not plan_of(only(chat())).include_stop


def test_token_ids_are_taken_as_they_are() -> None:
    assert completion(prompt=[5, 6]).prompts[0].tolist() == [5, 6]


def test_defaults_are_openais() -> None:
    request = only(completion())
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1, 1, 0)
    assert request.max_tokens == 16
    assert request.stop_token_ids == [EOS]


def test_a_model_has_defaults_of_its_own() -> None:
    planner = make_planner(sampling_defaults=SamplingDefaults(temperature=0.6, top_k=20))
    sampling = only(completion(planner)).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 1.0)
    sampling = only(completion(planner, temperature=0, top_k=-1)).sampling
    assert (sampling.temperature, sampling.top_k) == (0.0, 0)


def test_a_chat_may_fill_the_context() -> None:
    assert only(chat()).max_tokens == 100 - len(b"Hi:")


def test_a_chat_is_as_long_as_the_model_has_it_unless_it_says() -> None:
    planner = make_planner(sampling_defaults=SamplingDefaults(max_new_tokens=40))
    assert only(chat(planner)).max_tokens == 40
    assert only(chat(planner, max_tokens=60)).max_tokens == 60, "it is no limit"
    assert only(completion(planner)).max_tokens == 16
    planner = make_planner(sampling_defaults=SamplingDefaults(max_new_tokens=4000))
    assert only(chat(planner)).max_tokens == 100 - len(b"Hi:")


def test_the_default_of_a_completion_shrinks_to_what_is_left() -> None:
    assert only(completion(prompt=[7] * 95)).max_tokens == 5


def test_max_completion_tokens_goes_before_max_tokens() -> None:
    assert only(chat(max_tokens=7)).max_tokens == 7
    assert only(chat(max_tokens=7, max_completion_tokens=5)).max_tokens == 5


def test_the_context_can_be_filled_to_the_last_token() -> None:
    assert only(completion(prompt=[7] * 90, max_tokens=10)).max_tokens == 10


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "told"),
    [(100, None, "100, which leaves no room"), (101, 1, "101, which leaves"), (101, 0, "101$")],
)
def test_a_prompt_beyond_the_context_is_refused(
    num_prompt: int, max_tokens: int | None, told: str
) -> None:
    with pytest.raises(
        ContextLengthExceeded, match=f"100 tokens; the prompt has {told}"
    ) as refused:
        completion(prompt=[7] * num_prompt, max_tokens=max_tokens)
    assert refused.value.param == "prompt"


def test_max_tokens_beyond_the_context_is_cut_to_what_is_left() -> None:
    assert only(completion(prompt=[7] * 90, max_tokens=11)).max_tokens == 10
    assert only(completion(prompt=[7], max_tokens=10**400)).max_tokens == 99
    assert only(chat(max_tokens=5000)).max_tokens == 100 - len(b"Hi:")


def test_max_tokens_of_zero_only_scores_a_prompt() -> None:
    scored = completion(prompt=[7] * 100, max_tokens=0, echo=True, logprobs=1, n=2)
    assert [r.max_tokens for r in scored.requests] == [0, 0]
    assert [r.sampling.prompt_logprobs for r in scored.requests] == [1, 1]
    cut = completion(prompt="a" * 200, max_tokens=0, truncate_prompt_tokens=-1)
    assert len(cut.prompts[0]) == 100
    with pytest.raises(InvalidValue, match="max_tokens: must be at least 1, not 0"):
        chat(max_tokens=0)
    with pytest.raises(InvalidValue, match="min_tokens: must be at most 0, the limit of"):
        completion(max_tokens=0, min_tokens=1)


def test_allowed_token_ids_are_a_bit_for_each_token() -> None:
    assert only(completion()).allowed == b""
    allowed = only(completion(allowed_token_ids=[0, 9, 9, 255])).allowed
    assert int.from_bytes(allowed, "little") == 1 | 1 << 9 | 1 << 255
    assert only(chat(allowed_token_ids=[3])).allowed[0] == 8
    for wrong, told in [([], "must not be empty"), ([256], "256 is not a token id")]:
        with pytest.raises(InvalidValue, match=f"allowed_token_ids: {told}"):
            completion(allowed_token_ids=wrong)


def test_a_temperature_may_be_above_two() -> None:
    assert only(completion(temperature=2.5)).sampling.temperature == 2.5
    assert only(chat(temperature=1e300)).sampling.temperature == 1e6
    with pytest.raises(InvalidValue, match=r"temperature: must be at least 0, not -0\.1"):
        chat(temperature=-0.1)


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
    seeds = [
        only(planner.plan("completion", http, body)).sampling.seed for http in (HTTP, HTTP, other)
    ]
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
    with pytest.raises(InvalidValue, match="43 prompts x 3") as refused:
        completion(prompt=["a"] * 43, n=3)
    assert refused.value.param == "n"


def test_bad_words_of_all_sequences_are_bounded() -> None:
    words = [chr(97 + number % 26) * 900 + str(number) for number in range(64)]
    assert len(completion(prompt="a", n=4, bad_words=words).requests) == 4
    with pytest.raises(InvalidValue, match="tokens of all sequences are more than") as refused:
        completion(prompt="a", n=128, bad_words=words)
    assert refused.value.param == "bad_words"


def test_echo_of_token_ids_is_their_text() -> None:
    assert plan_of(only(completion(prompt=[72, 105], echo=True))).echo == "Hi"
    assert plan_of(only(completion(prompt=[72, 105]))).echo == ""


def test_response_plan_carries_what_rendering_needs() -> None:
    request = only(
        chat(
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            stop="x",
            include_stop_str_in_output=True,
            skip_special_tokens=False,
        )
    )
    plan = plan_of(request)
    assert plan.response_id.startswith("chatcmpl-")
    assert plan == ResponsePlan(
        response_id=plan.response_id,
        model="tiny",
        created=1234,
        api=Api.CHAT,
        stream=True,
        include_usage=True,
        continuous_usage=True,
        num_sequences=1,
        num_prompt_tokens=3,
        index=0,
        stop=["x"],
        include_stop=True,
        skip_special_tokens=False,
    )


def test_every_response_has_an_id_of_its_own() -> None:
    https = [HttpRequest(request_id(0, i), "POST", "/v1/completions", 0) for i in range(10)]
    body = b'{"prompt": "Hi"}'
    ids = {plan_of(only(make_planner().plan("completion", h, body))).response_id for h in https}
    assert len(ids) == 10
    assert all(id.startswith("cmpl-") for id in ids)


def test_a_request_that_is_sent_again_is_what_it_was_and_resumes() -> None:
    first = HttpRequest(request_id(0, 1), "POST", "/v1/completions", 5)
    sent = InflightRequest(first, b'{"prompt": "Hi", "n": 2}')
    sent.num_delivered = {1: 4}
    sent.renew(request_id(0, 9), is_response_suspect=True)
    old, new = (
        make_planner().plan("completion", http, sent.body).requests
        for http in (first, sent.request)
    )
    assert [r.id for r in new] == [request_id(0, 9) + i for i in range(2)]
    assert [r.resumes for r in new] == [r.id for r in old]
    assert [r.resumes for r in old] == [0, 0]
    sent.renew(request_id(0, 12))
    last = make_planner().plan("completion", sent.request, sent.body).requests
    assert [(r.resumes, r.earlier) for r in last] == [
        (before.id, [first.id]) for before, first in zip(new, old, strict=True)
    ]
    assert [r.sampling.seed for r in new] == [r.sampling.seed for r in old]
    assert [plan_of(r).response_id for r in new] == [plan_of(r).response_id for r in old]
    assert [plan_of(r).num_delivered for r in new] == [None, 4]
    assert [plan_of(r).is_suspect for r in [*old, *new]] == [False, False, True, True]


def test_requests_are_dealt_to_the_detokenizers_in_turn() -> None:
    planner = make_planner(num_detokenizers=3)
    https = [HttpRequest(request_id(0, i), "POST", "/v1/completions", 0) for i in range(6)]
    body = b'{"prompt": "Hi", "n": 2}'
    dealt = [{r.detokenizer for r in planner.plan("completion", h, body).requests} for h in https]
    assert dealt == [{0}, {1}, {2}] * 2


@pytest.mark.parametrize("plan", [chat, completion])
def test_another_models_name_is_refused(plan: Any) -> None:
    plan(model="tiny")
    with pytest.raises(ModelNotFound, match="'gpt-4' does not exist; this server has 'tiny'"):
        plan(model="gpt-4")


def test_every_wish_reaches_the_engine() -> None:
    request = only(
        completion(
            temperature=0.5,
            min_p=0.1,
            presence_penalty=-1,
            frequency_penalty=0.5,
            repetition_penalty=1.5,
            logit_bias={"7": -100, "8": 1.5},
            min_tokens=3,
            bad_words=["no", " way"],
            logprobs=2,
            prompt_logprobs=1,
            priority=-3,
            cache_salt="mine",
        )
    )
    assert request.sampling == Sampling(
        temperature=0.5,
        min_p=0.1,
        seed=1000 + ID,
        presence_penalty=-1,
        frequency_penalty=0.5,
        repetition_penalty=1.5,
        logit_bias={7: -100, 8: 1.5},
        bad_words=[list(b"no"), list(b" no"), list(b"way"), list(b" way")],
        min_tokens=3,
        logprobs=2,
        prompt_logprobs=1,
    )
    assert request.priority == -3
    plan = plan_of(request)
    assert (plan.logprobs, plan.prompt_logprobs, plan.min_tokens) == (2, 1, 3)


def test_prefixes_are_shared_under_one_salt() -> None:
    salts = [only(completion(cache_salt=salt)).salt for salt in ("a", "a", "b")]
    assert salts[0] == salts[1] != salts[2]
    assert only(completion()).salt == b""


def test_a_salt_of_any_size_takes_no_more_room() -> None:
    assert len(only(completion(cache_salt="x" * 100_000)).salt) == 16


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"logit_bias": {"x": 1}}, "logit_bias: 'x' is not a token id"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias: '9999999999999999999' is not a token id"),
        ({"logit_bias": {"256": 1}}, "logit_bias: 256 is not a token id; they go from 0 to 255"),
        ({"logit_bias": {"5": 101}}, "logit_bias: 101.0 for 5 is not between -100 and 100"),
        ({"stop_token_ids": [-1]}, "stop_token_ids: -1 is not a token id"),
        ({"min_tokens": 17}, "min_tokens: must be at most 16, the limit of"),
    ],
)
def test_what_the_model_does_not_know_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        completion(**fields)
    assert str(refused.value).startswith(says)


def test_candidates_are_more_than_answers_and_are_compared() -> None:
    requests = completion(n=2, best_of=3, prompt=["a", "b"]).requests
    assert len(requests) == 6
    assert {request.sampling.logprobs for request in requests} == {0}
    plan = plan_of(requests[0])
    assert (plan.num_sequences, plan.best_of, plan.n, plan.logprobs) == (6, 3, 2, None)
    assert only(completion(n=1, best_of=1)).sampling.logprobs is None


def test_an_echo_with_logprobs_watches_the_prompt() -> None:
    assert only(completion(echo=True, logprobs=2)).sampling.prompt_logprobs == 2
    assert only(completion(echo=True)).sampling.prompt_logprobs is None
    both = only(completion(echo=True, logprobs=2, prompt_logprobs=1))
    assert both.sampling.prompt_logprobs == 2
    assert (plan_of(both).logprobs, plan_of(both).prompt_logprobs) == (2, 1)


def test_a_prefix_lm_has_no_logprobs_of_its_prompts() -> None:
    planner = make_planner(is_prefix_lm=True)
    assert only(completion(planner, echo=True)).sampling.prompt_logprobs is None
    for fields in ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 2}):
        with pytest.raises(Unsupported, match="tokens of a prompt see later ones"):
            completion(planner, **fields)


def test_a_prompt_may_be_cut_to_its_end() -> None:
    assert completion(truncate_prompt_tokens=1).prompts[0].tolist() == [ord("i")]
    assert completion(prompt=[7, 8, 9], truncate_prompt_tokens=2).prompts[0].tolist() == [8, 9]
    assert bytes(chat(truncate_prompt_tokens=2).prompts[0].tolist()) == b"i:"
    assert plan_of(only(completion(truncate_prompt_tokens=1, echo=True))).echo == "i"


def test_a_prompt_may_be_cut_to_what_there_is_room_for() -> None:
    long = "a" * 1000
    for wanted, room in ((None, 16), (30, 30)):
        cut = completion(prompt=long, truncate_prompt_tokens=-1, max_tokens=wanted)
        assert (len(cut.prompts[0]), only(cut).max_tokens) == (100 - room, room)
    said = [{"role": "user", "content": long}]
    assert len(chat(messages=said, truncate_prompt_tokens=-1).prompts[0]) == 99
    assert bytes(chat(truncate_prompt_tokens=-1).prompts[0].tolist()) == b"Hi:"
    with pytest.raises(InvalidValue, match="room for an answer of 200 tokens in a context of 100"):
        completion(prompt=long, truncate_prompt_tokens=-1, max_tokens=200)


def test_a_text_that_is_cut_keeps_the_token_that_begins_it() -> None:
    cut = completion(prompt="a long text", truncate_prompt_tokens=3)
    assert cut.prompts[0].tolist() == [1, *b"xt"]


def test_the_prompt_of_a_chat_is_looked_at_once() -> None:
    wanted = [r.sampling.prompt_logprobs for r in chat(n=3, prompt_logprobs=1).requests]
    assert wanted == [1, None, None]
    wanted = [r.sampling.prompt_logprobs for r in completion(n=2, prompt_logprobs=1).requests]
    assert wanted == [1, 1]


def test_shares_go_by_api_key_then_by_user() -> None:
    no_user, me, again, you = (only(completion(user=u)).key for u in (None, "me", "me", "you"))
    assert no_user == 0
    assert me == again != you
    keyed = msgspec.structs.replace(HTTP, key=9)
    body = json.dumps({"prompt": "Hi", "user": "me"}).encode()
    assert only(make_planner().plan("completion", keyed, body)).key == 9


def test_a_model_does_what_it_is_for() -> None:
    with pytest.raises(WrongKind, match="generates text and has no embeddings"):
        make_planner().plan("embedding", HTTP, b'{"input": "Hi"}')
    for method, body in [
        ("chat", b'{"messages": [{"role": "user"}]}'),
        ("completion", b'{"prompt": "Hi"}'),
    ]:
        with pytest.raises(WrongKind, match="embeds and generates no text"):
            make_planner(embeds=True).plan(method, HTTP, body)


def test_what_cannot_fit_is_refused_before_it_is_encoded() -> None:
    planner = make_planner(encoder=LongTokens())
    for text, max_tokens in [("a" * 397, 1), ("a" * 401, 0), ("é" * 199, 1)]:
        stages = planner.generation.completion(HTTP, prompt_body(text, max_tokens))
        with pytest.raises(ContextLengthExceeded, match="the prompt has at least") as refused:
            next(stages)
        assert refused.value.param == "prompt"
    with pytest.raises(ContextLengthExceeded, match="the messages have at least 101, which leaves"):
        chat(planner, messages=[{"role": "user", "content": "a" * 400}])


@pytest.mark.parametrize(
    ("text", "max_tokens"), [("a" * 396, 1), ("a" * 380, 5), ("é" * 198, 1), ("x" * 1000, 1)]
)
def test_what_may_fit_is_encoded(text: str, max_tokens: int) -> None:
    planner = make_planner(encoder=LongTokens())
    assert next(planner.generation.completion(HTTP, prompt_body(text, max_tokens)))


def test_what_is_cut_fits_at_any_length() -> None:
    planner = make_planner(encoder=LongTokens())
    cut = completion(planner, prompt="a" * 1000, truncate_prompt_tokens=3)
    assert cut.prompts[0].tolist() == [1, *b"aa"]


def prompt_body(text: str, max_tokens: int) -> bytes:
    return json.dumps({"prompt": text, "max_tokens": max_tokens}).encode()


def test_prompts_are_returned_with_requested_token_ids() -> None:
    told = completion(prompt=["Hi", "you"], n=2, return_token_ids=True).requests
    prompts = [memoryview(plan_of(r).prompt_token_ids).cast("I").tolist() for r in told]
    assert prompts == [[1, *b"Hi"]] * 2 + [[1, *b"you"]] * 2
    assert plan_of(only(completion())).prompt_token_ids == b""


def test_a_chat_that_goes_on_begins_no_answer() -> None:
    with pytest.raises(InvalidValue, match="continue_final_message: not together"):
        chat(continue_final_message=True, add_generation_prompt=True)
    assert bytes(chat(continue_final_message=True).prompts[0].tolist()) == b"Hi"


def test_every_sequence_follows_the_grammar_of_its_request() -> None:
    for planned in (chat(guided_regex="a+", n=2), completion(guided_regex="a+", n=2)):
        assert [request.grammar for request in planned.requests] == [b"guided_regex: a+"] * 2
    assert only(chat()).grammar == b""


def test_eos_ends_a_text_with_a_grammar_even_where_it_is_ignored() -> None:
    ignoring = only(chat(guided_regex="a+", ignore_eos=True))
    assert ignoring.stop_token_ids == [EOS]
    assert ignoring.sampling.logit_bias == {EOS: float("-inf")}
    request = only(chat(guided_regex="a+", logit_bias={"5": 1}))
    assert (request.stop_token_ids, request.sampling.logit_bias) == ([EOS], {5: 1})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [[1] * 90] * 100, "prompt_logprobs": 20, "max_tokens": 1}, "prompt_logprobs"),
        ({"prompt": [[1] * 90] * 100, "echo": True, "logprobs": 20, "max_tokens": 1}, "logprobs"),
        ({"prompt": [1], "n": 100, "max_tokens": 90, "logprobs": 20}, "logprobs"),
    ],
)
def test_logprobs_of_a_request_are_bounded(
    fields: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    completion(**fields)
    monkeypatch.setattr(logprob_limit, "MAX_ENTRIES", 188_999)
    with pytest.raises(InvalidValue, match="more than 188999 in one request") as refused:
        completion(**fields)
    assert refused.value.param == param


def test_max_tokens_by_default_keep_logprobs_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob_limit, "MAX_ENTRIES", 21 * 2 * 30)
    planned = chat(n=2, logprobs=True, top_logprobs=20)
    assert [request.max_tokens for request in planned.requests] == [30, 30]


def test_logprobs_that_events_repeat_are_bounded_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob_limit, "MAX_REPEATED_ENTRIES", 40)
    echoed = {"prompt": [1] * 50, "echo": True, "logprobs": 0, "max_tokens": 1}
    completion(**echoed)
    with pytest.raises(InvalidValue, match="in a stream of this kind"):
        completion(**echoed, stream=True)
