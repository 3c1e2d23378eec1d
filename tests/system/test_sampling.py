"""What a request says about sampling is done, and what it asks about likelihood is true."""

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest
from reference import (
    NUM_PENALIZED,
    NUM_TEXTS,
    NUM_TOKENS,
    NUM_TOP,
    REPETITION_PENALTY,
    Expected,
    assert_likely,
    own_text,
)
from servers import RunningServer, wait_until

TIMEOUT_S = 300
TOLERANCE = 1e-3  # of log probabilities, between two ways to add in fp32
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def ask(server: RunningServer, path: str, **fields: object) -> Any:
    """Return a greedy answer, or one sampled as `fields` say."""
    body = {"temperature": 0, "max_tokens": 16} | fields
    response = httpx.post(f"{server.url}{path}", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: RunningServer, path: str, **fields: object) -> list[Any]:
    """Return the choices of a greedy stream's events."""
    body = {"temperature": 0, "max_tokens": 16, "stream": True} | fields
    with httpx.stream("POST", f"{server.url}{path}", json=body, timeout=TIMEOUT_S) as response:
        assert response.status_code == 200
        events = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return [json.loads(event)["choices"][0] for event in events]


def text_of(answer: Any) -> str:
    """Return the text of a completion's first choice."""
    text: str = answer["choices"][0]["text"]
    return text


def test_logprobs_of_a_chat_are_the_models(server: RunningServer, expected: list[Expected]) -> None:
    case = expected[0]
    fields = {"messages": case.messages, "logprobs": True, "top_logprobs": NUM_TOP}
    answer = ask(server, CHAT, max_tokens=NUM_TOKENS, **fields)["choices"][0]
    content = answer["logprobs"]["content"]
    text = b"".join(bytes(token["bytes"]) for token in content).decode()
    assert text == case.text(NUM_TOKENS)
    of_answer = case.likely[len(case.prompt_ids) - 1 :]
    for token, it in zip(content, of_answer[: len(content)], strict=True):
        top = [(entry["token"], entry["logprob"]) for entry in token["top_logprobs"]]
        assert_likely(case, token["logprob"], top, it, TOLERANCE)
    streamed = stream(server, CHAT, max_tokens=NUM_TOKENS, **fields)
    pieces = [choice["logprobs"]["content"] for choice in streamed if choice["logprobs"]]
    assert [token for piece in pieces for token in piece] == content


def test_an_echo_has_the_logprobs_of_the_prompt(
    server: RunningServer, expected: list[Expected]
) -> None:
    case = expected[0]
    fields = {"prompt": case.prompt_ids, "echo": True, "logprobs": NUM_TEXTS, "max_tokens": 4}
    (choice,) = ask(server, TEXT, skip_special_tokens=False, **fields)["choices"]
    logprobs = choice["logprobs"]
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert len(logprobs["tokens"]) == len(case.prompt_ids) + 4
    rows = zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True)
    for (logprob, top), it in zip(rows, case.likely, strict=False):
        listed = sorted(top.items(), key=lambda item: -item[1])[:NUM_TEXTS]
        assert_likely(case, logprob, listed, it, TOLERANCE, NUM_TEXTS)


def test_tokens_are_where_the_text_has_them(server: RunningServer) -> None:
    prompt = "Grüße 世界 🦊"
    fields = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 8}
    (choice,) = ask(server, TEXT, **fields)["choices"]
    text, logprobs = choice["text"], choice["logprobs"]
    assert text.startswith(prompt)
    assert any("\ufffd" in token for token in logprobs["tokens"])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert "\ufffd" in token or text[offset : offset + len(token)] == token
    streamed = stream(server, TEXT, **fields)
    offsets = [o for c in streamed if c["logprobs"] for o in c["logprobs"]["text_offset"]]
    assert offsets == logprobs["text_offset"]


def test_prompt_logprobs_are_the_models(server: RunningServer, expected: list[Expected]) -> None:
    case = expected[0]
    answer = ask(server, TEXT, prompt=case.prompt_ids, prompt_logprobs=NUM_TOP, max_tokens=1)
    first, *entries = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    for id, entry, it in zip(case.prompt_ids[1:], entries, case.likely, strict=False):
        own = entry[str(id)]
        assert own["decoded_token"] == own_text(case, id)
        ranked = sorted(entry.values(), key=lambda token: token["rank"])[:NUM_TOP]
        top = [(token["decoded_token"], token["logprob"]) for token in ranked]
        assert_likely(case, own["logprob"], top, it, TOLERANCE)
    assert len(entries) == len(case.prompt_ids) - 1


def test_each_kind_of_logprobs_has_as_many_as_asked(server: RunningServer) -> None:
    fields = {"prompt": "1, 2, 3, 4,", "echo": True, "logprobs": 3, "prompt_logprobs": 1}
    (choice,) = ask(server, TEXT, max_tokens=2, **fields)["choices"]
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} <= {3, 4}
    assert {len(entry) for entry in choice["prompt_logprobs"][1:]} <= {1, 2}


def test_a_bias_decides(server: RunningServer, expected: list[Expected]) -> None:
    case = expected[0]
    wanted, banned = case.ids[3], case.ids[0]
    body = {"prompt": case.prompt_ids, "max_tokens": 4}
    assert text_of(ask(server, TEXT, **body, logit_bias={str(wanted): 100})) == (
        own_text(case, wanted) * 4
    )
    answer = ask(server, TEXT, **body, logprobs=0, logit_bias={str(banned): -100})
    assert own_text(case, banned) not in answer["choices"][0]["logprobs"]["tokens"]


def test_a_bad_word_is_not_said(server: RunningServer, expected: list[Expected]) -> None:
    case = expected[0]
    word = case.text(NUM_TOKENS).split()[1]
    answer = ask(server, TEXT, prompt=case.prompt_ids, max_tokens=NUM_TOKENS, bad_words=[word])
    assert f" {word} " not in text_of(answer)
    assert text_of(answer) != case.text(NUM_TOKENS)


def test_repetition_is_penalized_as_in_transformers(
    server: RunningServer, expected: list[Expected]
) -> None:
    case = expected[0]
    answer = ask(
        server,
        TEXT,
        prompt=case.prompt_ids,
        max_tokens=NUM_PENALIZED,
        repetition_penalty=REPETITION_PENALTY,
    )
    penalized = case.tokenizer.decode(case.penalized_ids, skip_special_tokens=True)
    assert text_of(answer) == penalized != case.text(NUM_PENALIZED)


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0), (0, 0.7), (2, 2)])
def test_what_was_said_is_penalized(
    server: RunningServer, presence: float, frequency: float
) -> None:
    """Logprobs are those before penalties: the best of them after penalties is what was chosen."""
    answer = ask(
        server,
        TEXT,
        prompt="one two one two one two one",
        max_tokens=32,
        logprobs=20,
        ignore_eos=True,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    logprobs = answer["choices"][0]["logprobs"]
    said: Counter[str] = Counter()
    num_moved = 0
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        left = {t: v - frequency * said[t] - presence * (said[t] > 0) for t, v in top.items()}
        assert left[token] == pytest.approx(max(left.values()), abs=1e-4)
        num_moved += top[token] < max(top.values())
        said[token] += 1
    assert num_moved, "no penalty has changed anything"


def test_a_text_does_not_end_before_min_tokens(
    server: RunningServer, expected: list[Expected]
) -> None:
    case = next(case for case in expected if case.end in case.ids)
    num_tokens = len(case.ids) + 4
    body = {"prompt": case.prompt_ids, "max_tokens": num_tokens + 8}
    answer = ask(server, TEXT, **body, min_tokens=num_tokens)
    assert answer["usage"]["completion_tokens"] >= num_tokens
    assert text_of(answer).startswith(case.text(NUM_TOKENS))
    stop = case.text(NUM_TOKENS)[:2]
    assert text_of(ask(server, TEXT, **body, stop=stop)) == ""
    assert text_of(ask(server, TEXT, **body, stop=stop, min_tokens=4)) != ""


def test_a_stop_token_ends_a_text(server: RunningServer, expected: list[Expected]) -> None:
    case = expected[0]
    stop = next(i for i, id in enumerate(case.ids) if i > 2 and id not in case.ids[:i])
    body = {"prompt": case.prompt_ids, "max_tokens": NUM_TOKENS}
    answer = ask(server, TEXT, **body, stop_token_ids=[case.ids[stop]])
    assert text_of(answer) == case.text(stop)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == stop + 1


def test_min_p_of_one_leaves_the_likeliest(server: RunningServer, expected: list[Expected]) -> None:
    case = expected[1]
    answer = ask(server, TEXT, prompt=case.prompt_ids, min_p=1, temperature=2, max_tokens=24)
    assert text_of(answer) == case.text(24)


def test_best_of_answers_with_the_likeliest(server: RunningServer) -> None:
    body = {"prompt": ["Once upon a time", "The sea"], "temperature": 1, "seed": 3}
    body |= {"max_tokens": 8, "ignore_eos": True}
    every = ask(server, TEXT, **body, n=4, logprobs=0)
    best = ask(server, TEXT, **body, n=2, best_of=4)
    expected = []
    for group in (every["choices"][:4], every["choices"][4:]):
        group.sort(key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
        expected += [choice["text"] for choice in group[:2]]
    assert [choice["text"] for choice in best["choices"]] == expected
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert best["usage"] | {"prompt_tokens_details": None} == every["usage"] | {
        "prompt_tokens_details": None
    }


def test_prefixes_are_shared_under_one_salt(server: RunningServer) -> None:
    prompt = "It was the best of times, it was the worst of times. " * 10

    def num_cached(salt: str) -> int:
        answer = ask(server, TEXT, prompt=prompt, max_tokens=1, cache_salt=salt)
        cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached

    assert num_cached("ann") == 0
    assert num_cached("ann") > 0
    assert num_cached("bob") == 0


def test_the_end_of_a_long_prompt_may_be_taken(server: RunningServer) -> None:
    ids = list(range(100, 200))
    cut = ask(server, TEXT, prompt=ids, truncate_prompt_tokens=30)
    assert cut["usage"]["prompt_tokens"] == 30
    assert text_of(cut) == text_of(ask(server, TEXT, prompt=ids[-30:]))


def test_openai_client_reads_logprobs(server: RunningServer, expected: list[Expected]) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model="SmolLM2-135M-Instruct",
            messages=[{"role": "user", "content": expected[0].prompt}],
            temperature=0,
            max_tokens=4,
            logprobs=True,
            top_logprobs=2,
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(token.token for token in logprobs.content) == expected[0].text(4)
    assert all(
        a.logprob >= b.logprob for t in logprobs.content for a, b in pairwise(t.top_logprobs)
    )


@pytest.fixture(scope="module")
def narrow_server() -> Iterator[RunningServer]:
    """A server where one sequence runs and three wait."""
    flags = ("--max-num-seqs", "1", "--max-num-queued", "3", "--scheduling-policy", "priority")
    running = RunningServer(*flags)
    yield running
    running.close()


def await_waiting(server: RunningServer, count: int) -> None:
    wait_until(lambda: server.metric("num_requests_waiting") == count, f"{count} wait")


ENDLESS = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True}


def test_the_important_run_first_then_whose_key_has_had_less(narrow_server: RunningServer) -> None:
    server = narrow_server
    url = f"{server.url}{TEXT}"
    order = []

    def run(name: str, priority: int = 0) -> None:
        """Take the one place, when it is free, and leave it with the first token."""
        headers = {"Authorization": f"Bearer {name[0]}"}
        body = ENDLESS | {"priority": priority}
        with httpx.stream("POST", url, json=body, headers=headers, timeout=TIMEOUT_S) as response:
            next(response.iter_bytes())
            order.append(name)

    with ThreadPoolExecutor(3) as pool:
        with httpx.stream("POST", url, json=ENDLESS, timeout=TIMEOUT_S) as holder:
            assert holder.status_code == 200
            runs = []
            for name, priority in (("a1", 0), ("a2", -1), ("b1", 0)):
                runs.append(pool.submit(run, name, priority))
                await_waiting(server, len(runs))
        for one in runs:
            one.result()
    assert order == ["a2", "b1", "a1"]


def test_a_full_queue_is_a_429(narrow_server: RunningServer) -> None:
    server = narrow_server
    url = f"{server.url}{TEXT}"
    with httpx.stream("POST", url, json=ENDLESS, timeout=TIMEOUT_S) as response:
        assert response.status_code == 200
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ask, server, TEXT, prompt=["y"] * 3, max_tokens=1)
            await_waiting(server, 3)
            for streams in (False, True):
                body = {"prompt": ["z", "z"], "max_tokens": 1, "stream": streams}
                refused = httpx.post(url, json=body, timeout=TIMEOUT_S)
                assert refused.status_code == 429
                assert refused.headers["content-type"] == "application/json"
                assert int(refused.headers["retry-after"]) > 0
                error = refused.json()["error"]
                assert "--max-num-queued" in error["message"]
                assert error["code"] == "rate_limit_exceeded"
            response.close()
            assert waiting.result()["usage"]["completion_tokens"] == 3
    assert ask(server, TEXT, prompt=["z"], max_tokens=1)["usage"]["completion_tokens"] == 1
