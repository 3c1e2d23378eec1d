"""Measure the rate of the whole server beside that of its core, with the same batch.

Method: a server and an executor have the same file, of a real model. Random weights would draw
        tokens without text, which no stream shows. The executor is in a process of its own. In
        every round one is loaded while the other is stopped. B streams of `/v1/completions` begin
        together with 64 tokens, greedily. Their rate is that of the time in which all of them
        decode: no prompt is left, and none has ended. The core decodes the same batch: B sequences
        from 64 tokens on, one more in each step. It samples, too. Both have as many threads as the
        server chooses. The order changes with each round, and the first round is thrown away.
Run:    python bench/beside_core.py qwen2.5-coder-1.5b
"""

import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np

from against_vllm import PROMPT_TOKENS, prompts
from core_roofline import sampling_rows
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor, KVDtype
from headrace.engine_proc.worker.execution.cpu_sampler import Sampler
from headrace.engine_proc.worker.execution.executor import Batch, Int32s
from headrace.engine_proc.worker.models.model import open_model
from support.real_models import REAL_MODELS, fetch
from support.report import Quantity, Report, parser
from support.servers import Server, headrace
from support.streams import complete, full_rate

DECODES = ((1, 96), (8, 96), (32, 192))  # streams, tokens of each: prompts begin one after another
LIMIT = 0.95  # of the server's rate over the core's
SERVER, CORE = "server", "core"
PAGE_TOKENS = 32
LEAST_SHOWN = 0.97  # of tokens that have text


class CoreProcess:
    """A core in a process of its own, which is stopped while it is not asked."""

    def __init__(self, name: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--core", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.isa: str = self._read()
        self._process.send_signal(signal.SIGSTOP)

    def rate(self, prompts: list[list[int]], tokens: int) -> float:
        """See `Core`."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        print(json.dumps([prompts, tokens]), file=self._process.stdin, flush=True)
        rate: float = self._read()
        self._process.send_signal(signal.SIGSTOP)
        return rate

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def answer(name: str) -> None:
    """Measure the core for each line on standard input; print what comes of it."""
    core = Core(name)
    print(json.dumps(core.isa), flush=True)
    for line in sys.stdin:
        print(json.dumps(core.rate(*json.loads(line))), flush=True)


class Core:
    """An executor and a sampler, as the server's worker has them."""

    def __init__(self, name: str) -> None:
        model = open_model(fetch(name))
        pages = max(b * self._pages(tokens) for b, tokens in DECODES)
        self._executor = CpuExecutor(
            model.spec,
            model.weights,
            num_pages=pages,
            page_tokens=PAGE_TOKENS,
            kv_dtype=KVDtype.BFLOAT16,
            rounds_activations=True,
        )
        self._sampler = Sampler(model.spec.vocab_size)
        self.isa = self._executor.isa

    @staticmethod
    def _pages(tokens: int) -> int:
        return -(-(PROMPT_TOKENS + tokens) // PAGE_TOKENS)

    def rate(self, prompts: list[list[int]], tokens: int) -> float:
        """Compute prompts untimed, then as many tokens of each; return those of a second."""
        sequences, pages = len(prompts), self._pages(tokens)
        table = np.arange(sequences * pages, dtype=np.int32).reshape(sequences, pages)
        rows = np.arange(sequences, dtype=np.int32)
        drawn = np.concatenate([self._fill(*own) for own in zip(prompts, table, strict=True)])
        start = time.perf_counter()
        for position in range(PROMPT_TOKENS, PROMPT_TOKENS + tokens - 1):
            positions = np.full(sequences, position, np.int32)
            drawn = self._draw(Batch(drawn, positions, rows, table, rows))
        return sequences * (tokens - 1) / (time.perf_counter() - start)

    def _fill(self, prompt: list[int], pages: Int32s) -> Int32s:
        positions = np.arange(len(prompt), dtype=np.int32)
        ids = np.array(prompt, np.int32)
        return self._draw(Batch(ids, positions, positions * 0, pages[None], positions[-1:]))

    def _draw(self, batch: Batch) -> Int32s:
        logits = self._executor.logits(batch)
        rows = sampling_rows(len(logits.rows))
        rows["temperature"] = 0
        return self._sampler.sample(logits.rows, rows, maxima=logits.maxima)[0]


def server_rate(server: Server, prompts: list[list[int]], tokens: int) -> float:
    """Return the tokens per second while all streams decode."""
    server.resume()
    streams = complete(server.url, prompts, tokens)
    server.suspend()
    num_shown = sum(stream.num_after(0) for stream in streams)
    if num_shown < LEAST_SHOWN * tokens * len(streams):
        raise SystemExit(f"of {tokens * len(streams)} tokens only {num_shown} have text")
    return full_rate(streams)


def measure(name: str, server: Server, core: CoreProcess, rounds: int) -> list[Quantity]:
    """Let both take turns; return their rates."""
    quantities = [
        Quantity(f"{name} decode B={b}", "tok/s", {SERVER: [], CORE: []}, True) for b, _ in DECODES
    ]
    all_prompts = prompts(PROMPT_TOKENS)
    rates: list[tuple[str, Callable[[list[list[int]], int], float]]] = [
        (SERVER, lambda batch, tokens: server_rate(server, batch, tokens)),
        (CORE, core.rate),
    ]
    server.suspend()
    for number in range(rounds + 1):
        for (streams, tokens), quantity in zip(DECODES, quantities, strict=True):
            batch = list(itertools.islice(all_prompts, streams))
            for system, rate in rates if number % 2 else reversed(rates):
                measured = rate(batch, tokens)
                if number:
                    quantity.samples[system].append(measured)
                print(f"{quantity.name}, {system}: {measured:.1f} tok/s", flush=True)
    server.resume()
    return quantities


def main() -> None:
    """Run."""
    options = parser(__doc__, rounds=5)
    options.add_argument("models", nargs="*", default=["qwen2.5-coder-1.5b"], metavar="MODEL")
    options.add_argument("--core", choices=REAL_MODELS, help="be the core's process")
    args = options.parse_args()
    if args.core:
        answer(args.core)
        return
    report = Report("beside_core", args)
    for name in args.models:
        core = CoreProcess(name)
        report.versions["isa"] = core.isa
        with closing(core), headrace(str(fetch(name))) as server:
            for quantity in measure(name, server, core, args.rounds):
                report.add(quantity)
                if quantity.ratios and quantity.ratios[0] < LIMIT:
                    print(f"below {LIMIT}: {quantity.name}")
    report.finish()


if __name__ == "__main__":
    main()
