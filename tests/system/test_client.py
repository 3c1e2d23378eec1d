"""The client library and a real server."""

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from examples import run_examples
from servers import PATIENCE_S, RunningServer, survivors, wait_until

import headrace.client.client
from headrace import AsyncClient, Client
from headrace.errors import ApiError, ConfigError

LONG = {"max_tokens": 4000, "ignore_eos": True}
OWNER = """
import os, sys
from headrace import Client
client = Client.launch(engine="mock")
print(client._http.base_url, client._end_server.peek()[1].__self__._server.process.pid, flush=True)
sys.stdin.read()
"""


def children() -> set[psutil.Process]:
    """Return the processes that this one has."""
    return set(psutil.Process().children(recursive=True))


def test_the_examples_of_the_docstrings_are_true(server: RunningServer) -> None:
    with Client(server.url) as client:
        assert run_examples(headrace.client.client, client=client, Client=Client) > 10


def test_a_stream_is_canceled_while_another_thread_waits_for_it(server: RunningServer) -> None:
    server.settle()
    aborted = server.metric("aborted_sequences_total")
    with Client(server.url) as client:
        stream = client.stream_complete("Once", **LONG)
        texts = [next(stream)]
        reader = threading.Thread(target=lambda: texts.extend(stream))
        reader.start()
        stream.cancel()
        reader.join(PATIENCE_S)
        assert not reader.is_alive()
    wait_until(
        lambda: server.metric("aborted_sequences_total") == aborted + 1, "the server gives it up"
    )


async def test_async_stream_is_canceled_while_another_task_waits(
    server: RunningServer,
) -> None:
    server.settle()
    aborted = server.metric("aborted_sequences_total")
    async with AsyncClient(server.url) as client:
        stream = client.stream_complete("Once", **LONG)
        await anext(stream)

        async def rest() -> list[str]:
            return [text async for text in stream]

        reading = asyncio.create_task(rest())
        await asyncio.sleep(0)  # it waits
        stream.cancel()
        async with asyncio.timeout(PATIENCE_S):
            await reading
    wait_until(
        lambda: server.metric("aborted_sequences_total") == aborted + 1, "the server gives it up"
    )


def test_a_conversation_in_the_terminal(server: RunningServer) -> None:
    command = [Path(sys.executable).parent / "headrace", "chat", server.url]
    command += ["--temperature", "0", "--max-tokens", "8"]
    lines = "What is the capital of France?\nAnd of Spain?\n"
    chat = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (chat.returncode, chat.stderr) == (0, "")
    first, second = chat.stdout.splitlines()
    assert first == "The capital of France is Paris."
    assert second.startswith("The capital of Spain")


async def test_a_launched_server_has_its_keys_and_ends_with_its_client() -> None:
    others = children()
    client = await AsyncClient.launch(engine="mock", api_key=("secret",))
    ring = children() - others
    assert len(ring) == 7, "a supervisor, one of each kind, tokenizers of long prompts and GETs"
    assert (await client.chat("Hi", max_tokens=3)).usage.completion_tokens == 3
    with Client(client.url) as stranger, pytest.raises(ApiError) as refused:
        stranger.models()
    assert refused.value.status == 401
    await client.close()
    assert not survivors(ring)


def test_a_launched_server_ends_with_its_owner_however_that_ends() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    url, supervisor = owner.stdout.readline().split()
    with Client(url.decode()) as client:
        assert client.health()
    ring = [psutil.Process(int(supervisor))]
    ring += ring[0].children(recursive=True)
    owner.send_signal(signal.SIGKILL)
    owner.wait(PATIENCE_S)
    owner.stdin.close()
    owner.stdout.close()
    assert not survivors(ring)


def test_what_cannot_be_launched_is_refused_at_once() -> None:
    others = children()
    with pytest.raises(ConfigError, match="max_num_sq is not a flag"):
        Client.launch(max_num_sq=1)
    with pytest.raises(ConfigError, match="no such file"):
        Client.launch("/no/such/model")
    with pytest.raises(ConfigError, match="--max-num-seqs 0 is too small"):
        Client.launch(max_num_seqs=0)
    assert children() == others
