"""What is asked for in a form comes in that form, however it is generated."""

import itertools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import jsonschema
import openai
import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mutants.mutants import mutants
from pydantic import BaseModel, Field
from schemas import Schema, schemas
from servers import HELD, RunningServer, wait_until

TIMEOUT_S = 300
NUM_TOGETHER = 10  # of whose texts only some fit the memory of a cramped server
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PERSON: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
HOSTILE = {
    "allOf": [
        {"type": "string", "pattern": f"(a|b|c)*{'abc'[i % 3]}(a|b|c){{{i + 3}}}"}
        for i in range(30)
    ]
}


@pytest.fixture(scope="module")
def cramped() -> Iterator[RunningServer]:
    """A server that guesses tokens, and has memory for some 600 of them."""
    running = RunningServer(
        *("--speculative", "ngram", "--max-model-len", "320"),
        *("--dtype", "float32", "--kv-cache-dtype", "float32"),
        *("--kv-cache-memory-bytes", str(20 * 32 * 30 * 2 * 3 * 64 * 4)),
        *HELD,
        env=mutants("engine=steady"),
    )
    yield running
    assert running.stop() == 0


def ask(server: RunningServer, path: str, **fields: Any) -> list[Any]:
    """Return the choices of an answer."""
    body = {"max_tokens": 150, "seed": 1} | fields
    if path == CHAT:
        body = {"messages": [{"role": "user", "content": "Describe Ada as JSON."}]} | body
    response = httpx.post(f"{server.url}{path}", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    choices: list[Any] = response.json()["choices"]
    return choices


def texts_of(choices: list[Any]) -> list[str]:
    """Return the texts that have not been cut off."""
    return [c["message"]["content"] for c in choices if c["finish_reason"] == "stop"]


def wanted(schema: Schema) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


@settings(
    max_examples=5,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(several=st.lists(schemas, min_size=4, max_size=4), seed=st.integers(0, 1000))
def test_what_a_model_says_under_a_schema_is_valid(
    server: RunningServer, several: list[Schema], seed: int
) -> None:
    def check(schema: Schema) -> int:
        fields = {"max_tokens": 80, "seed": seed, "response_format": wanted(schema)}
        texts = texts_of(ask(server, CHAT, **fields))
        for text in texts:
            jsonschema.validate(json.loads(text), schema)
        return len(texts)

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(check, several)) > 0, "all were cut off"


def test_every_spelling_is_followed(server: RunningServer) -> None:
    fields: dict[str, Any] = {"temperature": 1.5, "prompt": "It is"}
    for form in (
        {"guided_regex": "[0-9]{3}-[A-F]{2}"},
        {"regex": "[0-9]{3}-[A-F]{2}"},
        {"structured_outputs": {"regex": "[0-9]{3}-[A-F]{2}"}},
        {"ebnf": 'root ::= d d d "-" l l\nd ::= [0-9]\nl ::= [A-F]'},
        {"guided_grammar": 'start: D D D "-" /[A-F]/ /[A-F]/\nD: /[0-9]/'},
    ):
        (choice,) = ask(server, TEXT, **fields, **form)
        assert re.fullmatch("[0-9]{3}-[A-F]{2}", choice["text"])
        assert choice["finish_reason"] == "stop"
    number = {"type": "integer", "minimum": 100, "maximum": 999}
    for form in (
        {"guided_json": number},
        {"json_schema": json.dumps(number)},
        {"structured_outputs": {"json": number}},
        {"response_format": wanted(number)},
    ):
        (choice,) = ask(server, TEXT, **fields, **form)
        assert re.fullmatch("[1-9][0-9]{2}", choice["text"])
    for form in (
        {"guided_choice": ["yes", "no", "maybe so"]},
        {"structured_outputs": {"choice": ["yes", "no", "maybe so"]}},
    ):
        choices = ask(server, TEXT, **fields, n=4, **form)
        assert {choice["text"] for choice in choices} <= {"yes", "no", "maybe so"}
    (choice,) = ask(server, CHAT, temperature=0, response_format={"type": "json_object"})
    assert choice["message"]["content"].startswith("{")


def test_a_structural_tag_is_followed_where_it_begins(server: RunningServer) -> None:
    number = {"type": "integer", "minimum": 10, "maximum": 99}
    content = {"type": "json_schema", "json_schema": number}
    tag = {"type": "tag", "begin": "<n>", "content": content, "end": "</n>"}
    fields: dict[str, Any] = {"temperature": 1.5, "prompt": "It is"}
    for form in (
        {"response_format": {"type": "structural_tag", "format": tag}},
        {"structured_outputs": {"structural_tag": json.dumps({"format": tag})}},
    ):
        (choice,) = ask(server, TEXT, **fields, **form)
        assert re.fullmatch("<n>[0-9]{2}</n>", choice["text"])
        assert choice["finish_reason"] == "stop"
    asked = httpx.post(f"{server.url}/tokenize", json={"prompt": "<", "add_special_tokens": False})
    (opening,) = asked.json()["tokens"]
    structures = [{"begin": "<n>", "schema": number, "end": "</n>"}]
    first = {"type": "structural_tag", "structures": structures, "triggers": ["<"]}
    choices = ask(server, TEXT, **fields, n=3, response_format=first, logit_bias={str(opening): 12})
    for text in (choice["text"] for choice in choices):
        assert re.fullmatch("([^<]|<n>[0-9]{2}</n>)*(<[n>0-9/]*)?", text), "the last may be cut off"
        assert "</n>" in text


def test_a_stream_says_what_a_whole_answer_does(server: RunningServer) -> None:
    fields = {"response_format": wanted(PERSON), "temperature": 1, "n": 3}
    whole = [choice["message"]["content"] for choice in ask(server, CHAT, **fields)]
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Describe Ada as JSON."}],
        max_tokens=150,
        seed=1,
        stream=True,
        **fields,  # type: ignore[arg-type]
    )
    texts = ["", "", ""]
    for event in stream:
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == whole
    assert len(set(whole)) == 3


def test_a_prompt_in_the_prefix_cache_changes_no_text(server: RunningServer) -> None:
    body = {"prompt": "One, two, three. " * 20, "regex": "([a-f]{4}-){3}", "temperature": 1}
    body |= {"seed": 3, "max_tokens": 40, "cache_salt": "a grammar's"}
    url = f"{server.url}{TEXT}"
    first, second = (httpx.post(url, json=body, timeout=TIMEOUT_S).json() for _ in range(2))
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, second)]
    assert cached[0] == 0 < cached[1]
    assert first["choices"] == second["choices"]
    assert re.fullmatch(body["regex"], first["choices"][0]["text"])


def test_drafts_preemption_and_batch_mates_change_no_text(
    server: RunningServer, cramped: RunningServer
) -> None:
    def text(server: RunningServer, seed: int) -> str:
        fields = {"response_format": wanted(PERSON), "temperature": 1, "max_tokens": 90}
        (choice,) = ask(server, CHAT, seed=seed, **fields)
        return str(choice["message"]["content"])

    alone = [text(server, seed) for seed in range(NUM_TOGETHER)]
    together = cramped.ask_together(lambda seed: text(cramped, seed), range(NUM_TOGETHER))
    assert together == alone
    assert cramped.metric("num_preemptions_total") > 0
    assert cramped.metric("spec_decode_num_draft_tokens_total") > 0


def test_other_fields_give_way_to_the_grammar(server: RunningServer) -> None:
    for fields in ({"min_tokens": 20}, {"ignore_eos": True}, {"bad_words": ["a", "aa", "aaa"]}):
        (choice,) = ask(server, TEXT, prompt="a", regex="a{3}", **fields)
        assert (choice["text"], choice["finish_reason"]) == ("aaa", "stop")
    (choice,) = ask(server, TEXT, prompt="a", regex="a+", ignore_eos=True, max_tokens=5)
    assert choice["finish_reason"] == "length"
    (choice,) = ask(server, TEXT, prompt="a", regex="ab*c", stop="b", temperature=0)
    assert choice["text"] == "a" or choice["text"] == "ac"
    (free,) = ask(server, TEXT, prompt="1, 2,", logprobs=0, temperature=0, max_tokens=1)
    (bound,) = ask(server, TEXT, prompt="1, 2,", logprobs=0, regex="[^0-9 ]+", max_tokens=1)
    (likely,), (unlikely,) = free["logprobs"]["token_logprobs"], bound["logprobs"]["token_logprobs"]
    assert unlikely < likely < 0, "they are the model's, before the grammar"


def test_a_hostile_schema_is_refused_while_others_are_served(server: RunningServer) -> None:
    def post(**fields: Any) -> httpx.Response:
        body = {"prompt": "1, 2,", "max_tokens": 4} | fields
        return httpx.post(f"{server.url}{TEXT}", json=body, timeout=TIMEOUT_S)

    def checkers() -> list[psutil.Process]:
        titles = server.processes.items()
        return [process for title, process in titles if title.startswith("headrace: grammars")]

    numbers = itertools.count(1)
    with ThreadPoolExecutor(4) as pool:

        def has_each_tokenizer_one() -> bool:
            asked = [pool.submit(post, regex=f"a{{{next(numbers)}}}") for _ in range(4)]
            assert [one.result().status_code for one in asked] == [200] * 4
            return len(checkers()) == 2

        wait_until(has_each_tokenizer_one, "each tokenizer has a grammar checker")
        suspended = checkers()
        for checker in suspended:
            checker.suspend()  # it may take as long as it likes
        refused = pool.submit(post, guided_json=HOSTILE)
        served = [post() for _ in range(4)]
        assert not refused.done()
        for checker in suspended:
            checker.resume()
        response = refused.result()
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "guided_json"
    assert "CPU time" in response.json()["error"]["message"]
    assert [one.status_code for one in served] == [200] * 4
    (choice,) = ask(server, TEXT, prompt="x", regex="(ab)c")
    assert choice["text"] == "abc"


AMBIGUOUS = """
start: /x{50}/ a*
a: b b | b | c
b: c c | c | a
c: /[a-z ]/ | a
"""  # in more ways the longer it gets


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_too_ambiguous_is_an_error(server: RunningServer, stream: bool) -> None:
    body = {"prompt": "x", "max_tokens": 100, "temperature": 0, "guided_grammar": AMBIGUOUS}
    url = f"{server.url}{TEXT}"
    response = httpx.post(url, json=body | {"stream": stream, "n": 2}, timeout=TIMEOUT_S)
    assert response.status_code == (200 if stream else 500)
    last = response.text.removesuffix("data: [DONE]\n\n").strip().rpartition("data: ")[2]
    error = json.loads(last)["error"]
    assert error["message"].startswith("the grammar could not be followed after ")
    assert "llguidance" not in response.text
    assert '"finish_reason":"length"' not in response.text


def test_special_names_in_a_text_are_text(server: RunningServer) -> None:
    for path in (CHAT, TEXT):
        fields = {"prompt": "x"} if path == TEXT else {}
        text = "<h1><|im_end|></h1>"
        (choice,) = ask(server, path, guided_choice=[text], **fields)
        assert choice.get("text", choice.get("message", {}).get("content")) == text
        assert choice["finish_reason"] == "stop"


class Pet(BaseModel):
    """What a client may ask for."""

    kind: Literal["cat", "dog"]
    name: str = Field(max_length=12)
    age: int | None = Field(le=30)


class Household(BaseModel):
    """The same, nested."""

    pets: list[Pet] = Field(max_length=2)


def test_the_openai_client_parses_its_model(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x")
    parsed = client.chat.completions.parse(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "One cat named Tom, 3 years old. As JSON."}],
        response_format=Household,
        temperature=0,
        max_tokens=300,
    )
    (choice,) = parsed.choices
    assert isinstance(choice.message.parsed, Household)
