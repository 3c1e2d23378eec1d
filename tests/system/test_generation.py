"""What the server generates is what the model says, however it is asked."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import openai
import pytest
from reference import NUM_TOKENS, Expected
from servers import RunningServer, wait_until

from headrace.client.responses import Usage

CONCURRENT = 32
TIMEOUT_S = 300
CHAT = "/v1/chat/completions"


def chat(server: RunningServer, case: Expected, max_tokens: int = NUM_TOKENS) -> dict[str, object]:
    """Return a greedy answer, whole."""
    body = {"messages": case.messages, "temperature": 0, "max_tokens": max_tokens}
    response = httpx.post(f"{server.url}{CHAT}", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    answer: dict[str, object] = response.json()
    return answer


def stream_text(
    server: RunningServer, case: Expected, max_tokens: int, leave_after: int | None = None
) -> str:
    """Return the text of a greedy stream; hang up after some chunks if told to."""
    body = {"messages": case.messages, "temperature": 0, "max_tokens": max_tokens, "stream": True}
    text, num_chunks = "", 0
    url = f"{server.url}{CHAT}"
    with httpx.stream("POST", url, json=body, timeout=TIMEOUT_S) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            num_chunks += 1
            text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
            if num_chunks == leave_after:
                break
    return text


def test_greedy_chat_equals_transformers(server: RunningServer, expected: list[Expected]) -> None:
    for case in expected:
        answer = chat(server, case)
        assert answer["choices"] == [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": case.text(NUM_TOKENS),
                    "refusal": None,
                },
                "logprobs": None,
                "finish_reason": case.finish_reason(NUM_TOKENS),
            }
        ]
        usage = msgspec.convert(answer["usage"], Usage)
        assert usage.prompt_tokens == len(case.prompt_ids)
        assert usage.completion_tokens == len(case.ids)
        assert usage.total_tokens == len(case.prompt_ids) + len(case.ids)


def test_a_prompt_said_again_is_found_in_the_prefix_cache(server: RunningServer) -> None:
    text = "The sea was calm and the boats were out. " * 20
    body = {"prompt": text, "temperature": 0, "max_tokens": 16}
    url = f"{server.url}/v1/completions"
    first, second = (httpx.post(url, json=body, timeout=TIMEOUT_S).json() for _ in range(2))
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < second["usage"]["prompt_tokens"] - cached <= 32, "all but the last page"
    assert second["choices"] == first["choices"]


def test_streams_are_exact_while_others_hang_up(
    server: RunningServer, expected: list[Expected]
) -> None:
    def run(i: int) -> str:
        leave_after = 2 + i % 5 if i % 2 else None
        return stream_text(server, expected[i // 2 % 8], 8 + i, leave_after)

    with ThreadPoolExecutor(CONCURRENT) as pool:
        texts = list(pool.map(run, range(CONCURRENT)))
    for i in range(0, CONCURRENT, 2):
        assert texts[i] == expected[i // 2 % 8].text(8 + i)
    server.settle()
    server.await_free("kv_pages")


def test_client_that_leaves_frees_its_place(
    server: RunningServer, expected: list[Expected]
) -> None:
    server.settle()
    aborted = server.metric("aborted_sequences_total")
    body = json.dumps({"messages": expected[0].messages, "max_tokens": 8000, "ignore_eos": True})
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port)) as client:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        client.sendall(f"{head}{body}".encode())
        wait_until(lambda: server.metric("num_requests_running") == 1, "it runs")
    wait_until(lambda: server.metric("aborted_sequences_total") == aborted + 1, "the abort arrives")
    wait_until(lambda: server.metric("num_requests_running") == 0, "the sequence ends")


def test_stop_string_ends_the_text_before_it(
    server: RunningServer, expected: list[Expected]
) -> None:
    case = expected[0]
    whole = case.text(NUM_TOKENS)
    stop = whole[len(whole) // 2 : len(whole) // 2 + 4]
    body = {"messages": case.messages, "temperature": 0, "stop": [stop, "never said"]}
    answer = httpx.post(f"{server.url}{CHAT}", json=body, timeout=TIMEOUT_S).json()
    assert answer["choices"][0]["message"]["content"] == whole[: whole.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    wait_until(lambda: server.metric("num_requests_running") == 0, "the engine hears of it")


def test_seed_repeats_a_sampled_answer(server: RunningServer) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 24, "seed": 7, "temperature": 1.0, "n": 3}
    url = f"{server.url}/v1/completions"
    with ThreadPoolExecutor(4) as pool:
        responses = list(
            pool.map(lambda _: httpx.post(url, json=body, timeout=TIMEOUT_S).json(), range(4))
        )
    texts = [[choice["text"] for choice in response["choices"]] for response in responses]
    assert texts[1:] == texts[:-1]
    assert len(set(texts[0])) == 3, "each of the n sequences has a seed of its own"


def test_openai_client_works(server: RunningServer, expected: list[Expected]) -> None:
    case = expected[0]
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    whole = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": case.prompt}],
        temperature=0,
        max_completion_tokens=NUM_TOKENS,
    )
    assert whole.choices[0].message.content == case.text(NUM_TOKENS)
    with client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": [{"type": "text", "text": case.prompt}]}],
        temperature=0,
        max_tokens=NUM_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == case.text(NUM_TOKENS)
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    completion = client.completions.create(
        model=model, prompt="1, 2, 3,", max_tokens=4, temperature=0
    )
    assert completion.choices[0].finish_reason == "length"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=model, prompt="x", max_tokens=-1)
    client.close()


async def test_async_openai_client_works(server: RunningServer, expected: list[Expected]) -> None:
    case = expected[1]
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model="SmolLM2-135M-Instruct",
            messages=[{"role": "user", "content": case.prompt}],
            temperature=0,
            max_tokens=NUM_TOKENS,
            stream=True,
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == case.text(NUM_TOKENS)
