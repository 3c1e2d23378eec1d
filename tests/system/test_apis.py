"""Every API returns the model's output to the client library of its vendor."""

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from described import check_event
from jsonschema import ValidationError
from reference import NUM_TOKENS, Expected
from servers import RunningServer

TIMEOUT_S = 300
RECORDED = Path(__file__).parent / "recorded"


def post(server: RunningServer, path: str, body: dict[str, Any]) -> Any:
    response = httpx.post(server.url + path, json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: RunningServer, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the events of a stream, "[DONE]" left out. They are as they are described."""
    found = []
    url = server.url + path
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=TIMEOUT_S) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                found.append(json.loads(line[6:]))
                check_event(server.url, path, found[-1])
    return found


class Chat:
    """`/v1/chat/completions`."""

    path = "/v1/chat/completions"

    def body(self, case: Expected, max_tokens: int, stop: list[str]) -> dict[str, Any]:
        fields = {"max_tokens": max_tokens, "temperature": 0, "stop": stop}
        return {"messages": case.messages} | fields

    def bound(self, schema: Any) -> dict[str, Any]:
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}

    def text(self, answer: Any) -> str:
        text: str = answer["choices"][0]["message"]["content"]
        return text

    def streamed(self, events: list[Any]) -> str:
        return "".join(e["choices"][0]["delta"].get("content") or "" for e in events)


class Completions(Chat):
    """`/v1/completions`, of the tokens of the same chat."""

    path = "/v1/completions"

    def body(self, case: Expected, max_tokens: int, stop: list[str]) -> dict[str, Any]:
        fields = {"max_tokens": max_tokens, "temperature": 0, "stop": stop}
        return {"prompt": case.prompt_ids} | fields

    def text(self, answer: Any) -> str:
        text: str = answer["choices"][0]["text"]
        return text

    def streamed(self, events: list[Any]) -> str:
        return "".join(map(self.text, events))


class Responses:
    """`/v1/responses`."""

    path = "/v1/responses"

    def body(self, case: Expected, max_tokens: int, stop: list[str]) -> dict[str, Any]:
        return {
            "input": case.messages,
            "max_output_tokens": max_tokens,
            "temperature": 0,
            "stop": stop,
        }

    def bound(self, schema: Any) -> dict[str, Any]:
        return {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}

    def text(self, answer: Any) -> str:
        ((part,),) = (item["content"] for item in answer["output"])
        text: str = part["text"]
        return text

    def streamed(self, events: list[Any]) -> str:
        return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")


class Messages:
    """`/v1/messages`."""

    path = "/v1/messages"

    def body(self, case: Expected, max_tokens: int, stop: list[str]) -> dict[str, Any]:
        fields = {"max_tokens": max_tokens, "temperature": 0, "stop_sequences": stop}
        return {"messages": case.messages} | fields

    def bound(self, schema: Any) -> dict[str, Any]:
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}

    def text(self, answer: Any) -> str:
        return "".join(block["text"] for block in answer["content"])

    def streamed(self, events: list[Any]) -> str:
        return "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")


class Generate:
    """`/generate`, of the tokens of the same chat."""

    path = "/generate"

    def body(self, case: Expected, max_tokens: int, stop: list[str]) -> dict[str, Any]:
        params = {"max_new_tokens": max_tokens, "temperature": 0, "stop": stop}
        return {"input_ids": case.prompt_ids, "sampling_params": params}

    def bound(self, schema: Any) -> dict[str, Any]:
        return {"sampling_params": {"json_schema": json.dumps(schema)}}

    def text(self, answer: Any) -> str:
        text: str = answer["text"]
        return text

    def streamed(self, events: list[Any]) -> str:
        texts = [event["text"] for event in events]
        assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
        return self.text(events[-1])


Api = Chat | Responses | Messages | Generate
APIS = [Chat(), Completions(), Responses(), Messages(), Generate()]


@pytest.fixture(params=APIS, ids=lambda api: api.path)
def api(request: pytest.FixtureRequest) -> Api:
    """Each API in turn."""
    found: Api = request.param
    return found


def said(server: RunningServer, api: Api, *bodies: dict[str, Any]) -> list[str]:
    """Return the answer to each request, all asked together, whole and streamed."""

    def ask(body: dict[str, Any]) -> str:
        text = api.text(post(server, api.path, body))
        assert api.streamed(stream(server, api.path, body)) == text
        return text

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(ask, bodies))


def some(expected: list[Expected]) -> list[Expected]:
    """Return a few of the cases, among them the one with characters of several tokens."""
    return expected[:2] + expected[-1:]


def test_greedy_text_equals_transformers_whole_and_streamed(
    server: RunningServer, expected: list[Expected], api: Api
) -> None:
    """A few prompts by each API; test_generation.py asks all."""
    cases = some(expected)
    bodies = [api.body(case, NUM_TOKENS, []) for case in cases]
    assert said(server, api, *bodies) == [case.text(NUM_TOKENS) for case in cases]


def across_tokens(case: Expected) -> str:
    """Return four characters of an answer, two of one token and two of those after it."""
    border = len(case.text(len(case.ids) // 2))
    return case.text(NUM_TOKENS)[border - 2 : border + 2]


def test_a_stop_string_across_tokens_ends_the_text_before_it(
    server: RunningServer, expected: list[Expected], api: Api
) -> None:
    cases = some(expected)
    bodies = [api.body(case, NUM_TOKENS, [across_tokens(case), "never said"]) for case in cases]
    wholes = [case.text(NUM_TOKENS) for case in cases]
    assert said(server, api, *bodies) == [
        whole[: whole.index(across_tokens(case))] for case, whole in zip(cases, wholes, strict=True)
    ]


SAID = "🦊 é 世界 👩‍🚀"  # as JSON it is all that the schema below allows


def test_multi_byte_text_streams_whole_and_stops_before_a_match(
    server: RunningServer, expected: list[Expected], api: Api
) -> None:
    tokenizer = expected[0].tokenizer
    assert "\ufffd" in map(tokenizer.decode, tokenizer(SAID).input_ids), "characters are cut"
    bodies = []
    for stop in ([], ["世界"]):
        body, bound = api.body(expected[0], NUM_TOKENS, stop), api.bound({"const": SAID})
        bodies.append(body | {name: body.get(name, {}) | bound[name] for name in bound})
    assert said(server, api, *bodies) == [f'"{SAID}"', f'"{SAID.partition("世界")[0]}']


# Anthropic's client


@pytest.fixture(scope="module")
def claude(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client of this server."""
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(server: RunningServer) -> str:
    """The name of the model."""
    name: str = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    return name


GREEDY = {"temperature": 0}


def asked(case: Expected) -> Any:
    return [{"role": "user", "content": case.prompt}]


def test_anthropics_client_is_answered(
    claude: anthropic.Anthropic, model: str, expected: list[Expected]
) -> None:
    case = expected[0]
    answer = claude.messages.create(
        model=model, messages=asked(case), max_tokens=NUM_TOKENS, extra_body=GREEDY
    )
    (block,) = answer.content
    assert block.type == "text"
    assert (block.text, answer.stop_reason) == (case.text(NUM_TOKENS), "end_turn")
    usage = answer.usage
    cached = usage.cache_read_input_tokens or 0
    assert (usage.input_tokens + cached, usage.output_tokens) == (
        len(case.prompt_ids),
        len(case.ids),
    )
    counted = claude.messages.count_tokens(model=model, messages=asked(case))
    assert counted.input_tokens == len(case.prompt_ids)


def test_anthropics_client_streams(
    claude: anthropic.Anthropic, model: str, expected: list[Expected]
) -> None:
    case = expected[1]
    with claude.messages.stream(
        model=model, messages=asked(case), max_tokens=8, extra_body=GREEDY
    ) as events:
        assert "".join(events.text_stream) == case.text(8)
        final = events.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 8)


async def test_anthropics_async_client_goes_on_with_a_begun_answer(
    server: RunningServer, model: str, expected: list[Expected]
) -> None:
    case = expected[0]
    begun = {"role": "assistant", "content": "The capital of France is"}
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="any") as client:
        answer = await client.messages.create(
            model=model, messages=[*asked(case), begun], max_tokens=8, extra_body=GREEDY
        )
        assert answer.content[0].type == "text"
        assert "Paris" in answer.content[0].text
        async with client.messages.stream(
            model=model,
            system="You answer with numbers.",
            messages=asked(expected[5]),
            max_tokens=8,
            stop_sequences=["17"],
        ) as events:
            final = await events.get_final_message()
    assert final.stop_reason in ("stop_sequence", "max_tokens", "end_turn")


def test_anthropics_client_raises_its_errors(claude: anthropic.Anthropic, model: str) -> None:
    hi: Any = [{"role": "user", "content": "Hi"}]
    with pytest.raises(anthropic.NotFoundError, match="the model 'claude' does not exist"):
        claude.messages.create(model="claude", messages=hi, max_tokens=8)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: must be at least 1"):
        claude.messages.create(model=model, messages=hi, max_tokens=0)


# OpenAI's client


@pytest.fixture(scope="module")
def gpt(server: RunningServer) -> Iterator[openai.OpenAI]:
    """OpenAI's client of this server."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_openais_client_has_its_response(
    gpt: openai.OpenAI, model: str, expected: list[Expected]
) -> None:
    case = expected[0]
    response = gpt.responses.create(
        model=model,
        input=case.prompt,
        temperature=0,
        max_output_tokens=NUM_TOKENS,
        metadata={"a": "b"},
    )
    assert (response.output_text, response.status) == (case.text(NUM_TOKENS), "completed")
    assert response.usage is not None
    assert response.usage.input_tokens == len(case.prompt_ids)
    assert response.usage.output_tokens == len(case.ids)
    assert response.metadata == {"a": "b"}
    again: Any = [{"role": "user", "content": case.prompt}, *response.output]
    more = gpt.responses.create(
        model=model,
        input=[*again, {"role": "user", "content": "And of Spain?"}],
        instructions="Be brief.",
        max_output_tokens=8,
    )
    assert more.output_text


def test_openais_client_streams_a_response(
    gpt: openai.OpenAI, model: str, expected: list[Expected]
) -> None:
    case = expected[1]
    with gpt.responses.stream(
        model=model,
        input=case.prompt,
        temperature=0,
        max_output_tokens=8,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    ) as events:
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        events.until_done()
    assert text == case.text(8)
    with pytest.raises(openai.BadRequestError, match="previous_response_id: not supported"):
        gpt.responses.create(model=model, input="Hi", previous_response_id="resp_1")


# All that events may have

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
TELLING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT | {"n": 2, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", CHAT | {"return_token_ids": True}),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 4, "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": ["Hi", "Ho"], "max_tokens": 4, "return_token_ids": True}),
    (
        "/v1/responses",
        {"input": "Hi", "max_output_tokens": 16, "include": ["message.output_text.logprobs"]},
    ),
    ("/v1/messages", CHAT),
    ("/generate", {"text": ["Hi", "Ho"], "return_logprob": True, "top_logprobs_num": 1}),
]


@pytest.mark.parametrize(("path", "body"), TELLING)
def test_events_are_as_they_are_described(
    server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    assert len(stream(server, path, body)) > 2
    with pytest.raises(ValidationError):
        check_event(server.url, path, {"id": "x"})


# What other programs send


def test_recorded_requests_of_vllms_benchmark(server: RunningServer, model: str) -> None:
    for one in json.loads((RECORDED / "vllm_bench_serve.json").read_text()):
        events = stream(server, one["path"], one["body"] | {"model": model})
        if one["path"] == "/v1/responses":
            assert events[-1]["response"]["usage"]["output_tokens"] == 8
            continue
        *chunks, last = events
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 8)
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_recorded_requests_to_sglang(server: RunningServer) -> None:
    whole, streamed, batch, likely, several, scored = json.loads(
        (RECORDED / "sglang_generate.json").read_text()
    )
    answer = post(server, "/generate", whole)
    assert answer["text"].startswith(" Paris")
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
    assert stream(server, "/generate", streamed)[-1]["text"] == answer["text"]
    first, second = post(server, "/generate", batch)
    assert first["text"] == answer["text"]
    assert second["meta_info"]["completion_tokens"] <= 4
    told = post(server, "/generate", likely)
    assert told["output_ids"] == answer["output_ids"]
    meta = told["meta_info"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == told["output_ids"]
    assert "".join(text for _, _, text in meta["output_token_logprobs"]) == told["text"]
    assert [token for _, token, _ in meta["input_token_logprobs"]] == likely["input_ids"]
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * 8
    assert len(post(server, "/generate", several)) == 2
    (score,) = post(server, "/generate", scored)
    assert score["output_ids"] == []
    assert score["meta_info"]["input_token_logprobs"] == [
        [logprob, token, None] for logprob, token, _ in meta["input_token_logprobs"]
    ]


def test_generate_batch_has_logprobs_of_each_prompt(server: RunningServer) -> None:
    admin_requests = [(True, 1, 2), (False, 0, 1), (True, -1, 0)]
    names = ("return_logprob", "logprob_start_len", "top_logprobs_num")
    prompts = [[504, 3575, 282], [504, 3575], [282, 504]]
    params = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}
    lists = dict(zip(names, map(list, zip(*admin_requests, strict=True)), strict=True))
    batch = {"input_ids": prompts, "sampling_params": params, "rid": "r"}
    told = post(server, "/generate", batch | lists)
    for prompt, admin_request, one in zip(prompts, admin_requests, told, strict=True):
        body = {"input_ids": prompt, "sampling_params": params} | dict(
            zip(names, admin_request, strict=True)
        )
        alone = post(server, "/generate", body)
        assert (one["text"], one["output_ids"]) == (alone["text"], alone["output_ids"])
        assert one["meta_info"].keys() == alone["meta_info"].keys()
        for name in [name for name in one["meta_info"] if "logprobs" in name]:
            assert ids_of(one["meta_info"][name]) == ids_of(alone["meta_info"][name]), name
    *_, last = stream(server, "/generate", batch | {"return_logprob": [False, False, True]})
    assert ("output_token_logprobs" in last["meta_info"]) == (last["index"] == 2)


def ids_of(told: Any) -> Any:
    """Return the token ids of log probabilities, however deep."""
    is_one = told and isinstance(told[-1], str | None)
    return told and (told[1] if is_one else [ids_of(one) for one in told])


def test_a_suffix_needs_a_model_that_fills_in_and_an_echo_none(server: RunningServer) -> None:
    body = {"prompt": [[504, 3575], [282]], "max_tokens": 1, "temperature": 0}
    url = f"{server.url}/v1/completions"
    refused = httpx.post(url, json=body | {"suffix": "."})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")
    plain, echoed = (post(server, "/v1/completions", body | {"echo": e}) for e in (False, True))
    prompts = ["The capital", " of"]
    for prompt, one, other in zip(prompts, plain["choices"], echoed["choices"], strict=True):
        assert other["text"] == prompt + one["text"]
