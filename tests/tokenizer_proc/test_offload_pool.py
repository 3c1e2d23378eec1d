"""Children handle requests as their tokenizer would; a death or a hang costs one request."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from servers import wait_until

from headrace.config.config import ServerConfig
from headrace.config.model_card import read_card
from headrace.config.process_configs import TokenizerConfig
from headrace.errors import DeadlyRequest, InvalidValue, RequestError
from headrace.ipc.messages import HttpRequest, request_id
from headrace.tokenizer_proc.jobs.stages import Check, ImmediateResponse, Outcome, Sequences
from headrace.tokenizer_proc.offload_pool import SMALL_BYTES, OffloadPool

pytestmark = pytest.mark.slow  # each test starts a process that loads a tokenizer

CONFIG = TokenizerConfig(
    run_dir="",
    cards=(read_card(ServerConfig()),),
    num_frontends=1,
    num_detokenizers=1,
    seed=0,
    started_at=0,
    num_tokenizers=1,
    max_batch_size=1,
    batch_wait_ms=0,
    trust_request_chat_template=True,
)
LARGE = "{% set x = 'x' * 400000000 %}"  # bytes
MAX_BYTES = 320 << 20  # a child that is loaded has a third of that
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@contextmanager
def closing_children(pool: OffloadPool) -> Iterator[OffloadPool]:
    yield pool
    for child in children():
        child.kill()
        child.wait()


@pytest.fixture
def pool() -> Iterator[OffloadPool]:
    with closing_children(OffloadPool(CONFIG)) as made:
        yield made


def children() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if is_offload(one)]


def is_offload(child: psutil.Process) -> bool:
    try:
        command = child.cmdline()
    except psutil.NoSuchProcess:  # it has ended; a zombie has, too
        return False
    title = f"headrace: offload of {os.getpid()}"
    return command[:1] == [title] or "headrace.tokenizer_proc.offload_process" in command


class Asked:
    """A request that is being handled."""

    def __init__(self, pool: OffloadPool, path: str = "/v1/completions", **fields: object) -> None:
        request = HttpRequest(request_id(0, 1), "POST", path, 0.0)
        self.stages = pool.handle(request, memoryview(json.dumps(fields).encode()))
        check = next(self.stages)
        assert isinstance(check, Check)
        self._check = check

    @property
    def is_waiting(self) -> bool:
        return self._check.found is None

    def outcome(self) -> Outcome:
        """Return the outcome as soon as it is known."""
        wait_until(lambda: self._check.found is not None, "no outcome")
        try:
            self.stages.send([])
        except StopIteration as end:
            found: Outcome = end.value
            return found
        raise AssertionError("it waits twice")


def endless(pool: OffloadPool, before: str = "") -> Asked:
    """Ask for what takes a child as long as it may, after another template."""
    messages = [{"role": "user", "content": "x"}]
    return Asked(pool, "/v1/chat/completions", messages=messages, chat_template=before + ENDLESS)


def error_of(asked: Asked) -> RequestError:
    with pytest.raises(RequestError) as refused:
        asked.outcome()
    return refused.value


def large(pool: OffloadPool) -> Asked:
    """Ask for what takes a child as long as it may, in a large body."""
    return endless(pool, before=" " * SMALL_BYTES)


def test_child_returns_sequences_and_answers(pool: OffloadPool) -> None:
    planned = Asked(pool, prompt=["one two", "three"], n=2, max_tokens=3).outcome()
    assert isinstance(planned, Sequences)
    assert [bytes(prompt) for prompt in planned.prompts[::2]] == [
        bytes(prompt) for prompt in planned.prompts[1::2]
    ]
    assert bytes(planned.prompts[2]) != bytes(planned.prompts[0])
    assert [request.max_tokens for request in planned.requests] == [3] * 4
    answer = Asked(pool, "/tokenize", prompt="one two", return_token_strs=True).outcome()
    assert isinstance(answer, ImmediateResponse)
    assert json.loads(answer.body)["tokens"] == planned.prompts[0].tolist()
    refused = Asked(pool, prompt=5).outcome()
    assert isinstance(refused, ImmediateResponse)
    assert refused.status == 400
    assert len(children()) == 1


def test_slow_template_is_refused_by_the_child_alone(pool: OffloadPool) -> None:
    slow = endless(pool)
    messages = [{"role": "user", "content": "x"}]
    answer = Asked(pool, "/v1/chat/completions", messages=messages).outcome()
    assert isinstance(answer, Sequences)
    refused = slow.outcome()
    assert isinstance(refused, ImmediateResponse)
    assert b"takes more than 2 s of CPU time" in refused.body


def test_large_bodies_leave_a_child_to_small_ones(pool: OffloadPool) -> None:
    pool._max_processes = 2
    asked = [large(pool), large(pool)]
    assert isinstance(Asked(pool, prompt="one two").outcome(), Sequences)
    assert [one.is_waiting for one in asked] == [True, True]
    assert len(children()) == 2
    for one in asked:
        one.stages.close()
    assert isinstance(Asked(pool, prompt="three").outcome(), Sequences)


def test_request_at_which_two_children_die_fails(pool: OffloadPool) -> None:
    asked = endless(pool)
    pids = []
    for _ in range(2):
        wait_until(lambda: any(child.pid not in pids for child in children()), "a child")
        (child,) = (one for one in children() if one.pid not in pids)
        pids.append(child.pid)
        child.send_signal(signal.SIGKILL)
    assert isinstance(error_of(asked), DeadlyRequest)
    assert isinstance(Asked(pool, prompt="two").outcome(), Sequences)


@pytest.mark.parametrize("signum", [signal.SIGXCPU, signal.SIGPROF])
def test_child_out_of_cpu_time_refuses_its_request(
    signum: signal.Signals, pool: OffloadPool
) -> None:
    asked = endless(pool)
    wait_until(lambda: bool(children()), "a child")
    children()[0].send_signal(signum)  # as the kernel sends it
    refused = error_of(asked)
    assert isinstance(refused, InvalidValue)
    assert "s of CPU time to handle" in str(refused)


def test_child_out_of_memory_refuses_its_request() -> None:
    with closing_children(OffloadPool(CONFIG, max_bytes=MAX_BYTES)) as pool:
        assert isinstance(Asked(pool, prompt="one").outcome(), Sequences)
        refused = error_of(endless(pool, before=LARGE))
        assert isinstance(refused, InvalidValue)
        assert "the body takes more than 320 MiB of memory to handle" in str(refused)
        assert isinstance(Asked(pool, prompt="two").outcome(), Sequences)


def test_child_whose_client_leaves_is_ended(pool: OffloadPool) -> None:
    asked = endless(pool)
    wait_until(lambda: bool(children()), "a child")
    (child,) = children()
    asked.stages.close()
    child.wait(120)
    assert isinstance(Asked(pool, prompt="two").outcome(), Sequences)


def test_idle_child_is_ended(pool: OffloadPool) -> None:
    pool._idle_s = 0.0
    assert isinstance(Asked(pool, prompt="one").outcome(), Sequences)
    wait_until(lambda: not children(), "it is still there")
    assert isinstance(Asked(pool, prompt="two").outcome(), Sequences)
