"""Measure the rate of the whole server beside that of its core, with the same batch.

Method: a server and an executor have the same weights, which both make up. In every round one is
        loaded while the other rests: the server is stopped, the executor is a library of this
        process. B streams of `/v1/completions` begin together with 64 tokens, greedily. Their rate
        is that of the time in which all of them decode: no prompt is left, and none has ended. The
        core decodes the same batch: B sequences from 64 tokens on, one more in each step. It
        samples, too. Both have as many threads as the server chooses. The order changes with each
        round, and the first round is thrown away.
Run:    python bench/beside_core.py --shape qwen2.5-1.5b
"""

import itertools
import time
from collections.abc import Callable

import numpy as np

from against_vllm import DECODES, PROMPT_TOKENS, prompts
from core_roofline import sampling_rows
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor, KVDtype
from headrace.engine_proc.worker.execution.cpu_sampler import Sampler
from headrace.engine_proc.worker.execution.executor import Batch, Int32s
from headrace.engine_proc.worker.models.model import open_model
from support.report import Quantity, Report, parser
from support.servers import Server, headrace
from support.shapes import shape_folder
from support.streams import complete, full_rate

SHAPES = ("qwen2.5-1.5b", "llama-3.1-8b")
LIMIT = 0.95  # of the server's rate over the core's
SERVER, CORE = "server", "core"
PAGE_TOKENS = 32


class Core:
    """An executor and a sampler, as the server's worker has them."""

    def __init__(self, shape: str) -> None:
        model = open_model(shape_folder(shape), "dummy")
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
    return full_rate(streams)


def measure(shape: str, server: Server, core: Core, rounds: int) -> list[Quantity]:
    """Let both take turns; return their rates."""
    quantities = [
        Quantity(f"{shape} decode B={b}", "tok/s", {SERVER: [], CORE: []}, True) for b, _ in DECODES
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
    options.add_argument("--shape", nargs="+", default=SHAPES[:1], choices=SHAPES)
    args = options.parse_args()
    report = Report("beside_core", args)
    for shape in args.shape:
        core = Core(shape)
        report.versions["isa"] = core.isa
        with headrace(str(shape_folder(shape)), "--load-format", "dummy") as server:
            for quantity in measure(shape, server, core, args.rounds):
                report.add(quantity)
                if quantity.ratios and quantity.ratios[0] < LIMIT:
                    print(f"below {LIMIT}: {quantity.name}")
    report.finish()


if __name__ == "__main__":
    main()
