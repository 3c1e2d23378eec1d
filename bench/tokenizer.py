"""Measure tokenization speed, and the gain of batches.

Method: the demo model's tokenizer in both libraries, each in a process of its own with one thread.
        A text is new to the process ("cold") or repeated ("warm"). Words are random letters. Then a
        tokenizer process, with either library, takes one request at a time or up to 32. 32 chats
        wait in its inbox, and a played engine receives its output.
Run:    python bench/tokenizer.py --rounds 5
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from headrace.board.board import Board, Seat, State
from headrace.config.config import ServerConfig
from headrace.config.model_card import read_card
from headrace.config.process_configs import TokenizerConfig
from headrace.ipc.messages import HttpRequest, ToEngine, ToTokenizer, request_id
from headrace.ipc.sockets import Frame, Inbox, Outbox, address
from headrace.model.tokenizer_json import read_tokenizer_json
from headrace.runtime.process import Context
from headrace.tokenizer_proc.encoding.encoder import Fast, HuggingFace, Tokenizer
from headrace.tokenizer_proc.jobs.aborts import Aborts
from headrace.tokenizer_proc.service import Service
from support.models import demo_model
from support.report import Quantity, Report, parser

SIZES = {"40 words": 40, "310 words, 2 kB": 310, "300,000 words, 2 MB": 300_000}
LIBRARIES: dict[str, Callable[[bytes], Tokenizer]] = {"fastokens": Fast, "tokenizers": HuggingFace}
ONE_THREAD = {"FASTOKENS_BPE_THREADS": "1", "RAYON_NUM_THREADS": "1"}
WARM_WORDS = 30_000  # encoded again, at least
WAITING = 32
ROUNDS = 60  # of as many chats, the first of which are thrown away
DEADLINE_MS = 10_000


def random_words(number: int, seed: int) -> str:
    """Return a text of random words, of two to nine letters each."""
    draw = random.Random(seed)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    return " ".join("".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(number))


def encode(library: str, num_words: int, seed: int) -> dict[str, float]:
    """Return million tokens a second, of a text that is new and of the same again."""
    tokenizer = LIBRARIES[library](read_tokenizer_json(demo_model()))
    tokenizer.encode(["Hello"], add_special_tokens=False)
    text = random_words(num_words, seed)
    rates = {}
    for name, times in (("cold", 1), ("warm", max(1, WARM_WORDS // num_words))):
        begun = time.perf_counter()
        for _ in range(times):
            (ids,) = tokenizer.encode([text], add_special_tokens=False)
        rates[name] = len(ids) * times / (time.perf_counter() - begun) / 1e6
    return rates


class Waiting(Inbox[ToTokenizer]):
    """An inbox of messages that have all come."""

    def __init__(self) -> None:
        self.messages: deque[tuple[ToTokenizer, Frame]] = deque()

    def receive(self, timeout_ms: int) -> tuple[ToTokenizer, Frame] | None:
        """Return the next of them."""
        return self.messages.popleft() if self.messages else None


class Played:
    """A tokenizer process's work between links whose other ends are here."""

    def __init__(self, run_dir: str, library: str, batch_size: int) -> None:
        config = TokenizerConfig(
            run_dir=run_dir,
            cards=(read_card(ServerConfig()),),
            num_frontends=1,
            num_detokenizers=1,
            seed=0,
            started_at=0,
            num_tokenizers=1,
            max_batch_size=batch_size,
            batch_wait_ms=2,
        )
        board = Board.create([Seat("tokenizer", 0), Seat("frontend", 0), Seat("engine", 0)])
        board.slot("engine").enter(State.READY)
        context = Context(Seat("tokenizer", 0), board, board.slots[0], "warning", 0)
        self._inbox: Inbox[ToTokenizer] = Inbox(address(run_dir, "tokenizer"), ToTokenizer)
        self._engine: Inbox[ToEngine] = Inbox(address(run_dir, "engine"), ToEngine)
        self._frontend = Outbox(address(run_dir, "tokenizer"))
        self._waiting = Waiting()
        aborts = Aborts(run_dir, 0)
        self._service = Service(config, context, self._waiting, aborts, batch_size, 0.002)
        if library == "fastokens":
            self._service.load_fast()

    def microseconds(self) -> float:
        """Return what a chat costs, of `WAITING` that wait."""
        message = {"role": "user", "content": "Which river runs past the old mill, and where to?"}
        body = json.dumps({"messages": [message], "max_tokens": 64, "stream": True}).encode()
        spent = []
        for _ in range(ROUNDS):
            for number in range(WAITING):
                request = HttpRequest(request_id(0, number), "POST", "/v1/chat/completions", 0.0)
                self._frontend.send(request, body)
                received = self._inbox.receive(DEADLINE_MS)
                assert received is not None
                self._waiting.messages.append(received)
            begun = time.perf_counter()
            while self._waiting.messages:
                self._service.handle(0)
            spent.append((time.perf_counter() - begun) / WAITING * 1e6)
            for _ in range(WAITING):
                assert self._engine.receive(DEADLINE_MS) is not None
        return sorted(spent)[len(spent) // 4]


def serve(library: str, batch_size: int) -> float:
    """Return the microseconds that a chat costs a tokenizer process."""
    with tempfile.TemporaryDirectory() as run_dir:
        return Played(run_dir, library, batch_size).microseconds()


def ask(role: str, *args: object) -> Any:
    """Run a function of this file in a process of its own and return what it returns."""
    command = [sys.executable, __file__, role, json.dumps(args)]
    env = {**os.environ, **ONE_THREAD}
    return json.loads(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout)


def main() -> None:
    """Run."""
    args = parser(__doc__, rounds=5).parse_args()
    report = Report("tokenizer", args)
    rates = {
        (size, state): Quantity(
            f"{size}, {state}", "million tokens/s", {name: [] for name in LIBRARIES}, True
        )
        for size in SIZES
        for state in ("cold", "warm")
    }
    costs = {
        size: Quantity(f"a chat, {name}", "us", {library: [] for library in LIBRARIES})
        for size, name in ((1, "one at a time"), (WAITING, f"up to {WAITING} at a time"))
    }
    for seed in range(args.rounds):
        for library in LIBRARIES:
            for size, num_words in SIZES.items():
                for state, rate in ask("encode", library, num_words, seed).items():
                    rates[size, state].samples[library].append(rate)
            for batch_size, cost in costs.items():
                cost.samples[library].append(ask("serve", library, batch_size))
    for quantity in (*rates.values(), *costs.values()):
        report.add(quantity)
    report.finish()


if __name__ == "__main__":
    roles: dict[str, Callable[..., Any]] = {"encode": encode, "serve": serve}
    if sys.argv[1:2] and sys.argv[1] in roles:
        print(json.dumps(roles[sys.argv[1]](*json.loads(sys.argv[2]))))
    else:
        main()
