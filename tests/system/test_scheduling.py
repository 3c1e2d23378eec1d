"""The order in which a real server runs requests."""

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
from servers import HELD, RunningServer, wait_until

from headrace.engine_proc.scheduling.waiting_queue import AGE_TOKENS

SHARED = list(range(1000, 1320))  # whole pages that all but one begin with
STRANGE = [7] * 20
NUM_CLIENTS = 4  # each asks again and again
NUM_TOKENS = 8  # of an answer, and so its steps, at least
MAX_ANSWERS = 100  # then they give up


def test_request_without_shared_prefix_waits_for_near_ones_only() -> None:
    server = RunningServer("--scheduling-policy", "lpm", "--max-num-seqs", "1", *HELD)
    answered: list[int] = []
    is_done = threading.Event()

    def ask(prompt: list[int]) -> int:
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
        done = httpx.post(f"{server.url}/v1/completions", json=body)
        assert done.status_code == 200, done.text
        return len(answered)

    def ask_again_and_again(client: int) -> None:
        while not is_done.is_set() and len(answered) < MAX_ANSWERS:
            ask([*SHARED, client])
            answered.append(client)

    def await_tokens(num: int) -> None:
        wait_until(lambda: server.metric("prompt_tokens_total") == num, f"{num} have been sent on")

    try:
        ask(SHARED)
        worker = server.ring["headrace: worker 0"]
        with ThreadPoolExecutor(NUM_CLIENTS + 1) as pool:
            worker.suspend()
            try:
                clients = [pool.submit(ask_again_and_again, 0)]
                await_tokens(2 * len(SHARED) + 1)
                stranger = pool.submit(ask, STRANGE)
                await_tokens(2 * len(SHARED) + 1 + len(STRANGE))
                clients += [pool.submit(ask_again_and_again, n) for n in range(1, NUM_CLIENTS)]
                await_tokens((NUM_CLIENTS + 1) * len(SHARED) + NUM_CLIENTS + len(STRANGE))
            finally:
                worker.resume()
            num_first = stranger.result()
            is_done.set()
            for client in clients:
                client.result()
    finally:
        server.stop()
    # A known prefix is worth so many steps of waiting: later requests come after this one. As many
    # as there are clients may have been answered before it arrives.
    num_soon = len(SHARED) // AGE_TOKENS // NUM_TOKENS + 1
    assert 1 < num_first <= NUM_CLIENTS + num_soon + NUM_CLIENTS
