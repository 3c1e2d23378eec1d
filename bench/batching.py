"""Measure the gain of encoding requests together at rising arrival rates.

Method: one server encodes up to 32 waiting requests at once, the default; the other encodes one at
        a time (`--tokenizer-max-batch-size 1`). Both run the mock encoder, whose steps leave room,
        with a BERT's tokenizer. Texts of 500 tokens, no two alike, arrive as a Poisson process from
        a load process of its own. The rate rises in steps until the server without batches
        saturates. It is saturated if it answers over 5 % fewer than arrive, or if its p99 exceeds
        half a second, twice. Then both take turns at that rate and at parts of it. Refusals are
        switched off and would be errors.
Run:    python bench/batching.py --rounds 3
"""

import asyncio
import dataclasses
import sys
from contextlib import ExitStack

import numpy as np

from headrace.bench.arrivals import arrival_times
from headrace.bench.endpoint import PATHS, Endpoint
from headrace.bench.load import LoadRequest, run_load
from headrace.bench.workload import TokenRates, body_of, random_prompts
from headrace.config.config import ServerConfig
from support.report import Quantity, Report, parser
from support.servers import Server, headrace
from support.tiny import encoder_folder

NUM_TOKENS = 490  # and what goes around them, of 512
FIRST_RATE, RATE_STEP, MAX_RATE = 400.0, 1.15, 20_000.0  # requests a second
SATURATED_MS = 500.0  # p99
SHARES = (0.25, 0.5, 0.75, 1.0)  # of the rate at which it saturates
ONE_BY_ONE = ("--tokenizer-max-batch-size", "1")
COMMON = (
    *("--engine", "mock", "--mock-profile", "encoder"),
    *("--max-num-seqs", "64", "--max-num-queued", "1000000"),
)


class Load:
    """Texts to embed, at any rate."""

    def __init__(self, server: Server) -> None:
        self._endpoint = Endpoint(server.url, "embeddings", PATHS["embeddings"], {})
        model = self._endpoint.model()
        self._rates: TokenRates = self._endpoint.rates(model, "")
        self._model = model

    def requests(self, rate: float, seconds: float, seed: int) -> list[LoadRequest]:
        """Return what arrives in some seconds."""
        random = np.random.default_rng(seed)
        prompts = random_prompts(
            max(1, round(rate * seconds)),
            input_len=NUM_TOKENS,
            output_len=1,
            range_ratio=0.0,
            prefix_len=0,
            rates=self._rates,
            random=random,
        )
        due = arrival_times(len(prompts), rate, 1.0, random)
        return [
            LoadRequest(i, float(at), body_of(prompt, "embeddings", self._model, {}))
            for i, (prompt, at) in enumerate(zip(prompts, due, strict=True))
        ]


def embed(server: Server, requests: list[LoadRequest]) -> tuple[float, float, float]:
    """Send requests when they are due; return p50 and p99 in ms, and how many a second came."""
    outcome = asyncio.run(
        run_load(Endpoint(server.url, "embeddings", PATHS["embeddings"], {}).target, requests)
    )
    if outcome.is_client_bound:
        print("the load generator was the bottleneck", file=sys.stderr)
    errors = {record.error for record in outcome.records if record.error}
    if errors:
        raise SystemExit(f"failed: {errors}")
    took = [1e3 * (record.last - record.due) for record in outcome.records]
    rate = len(took) / (max(record.last for record in outcome.records) - outcome.start)
    p50, p99 = np.percentile(took, [50, 99])
    return float(p50), float(p99), rate


def find_saturation(server: Server, load: Load, seconds: float) -> float | None:
    """Return the first rate that the server cannot keep up with."""
    rate = FIRST_RATE
    failures = 0
    while rate < MAX_RATE:
        _, p99, answered = embed(server, load.requests(rate, seconds, seed=failures))
        print(f"{rate:,.0f} req/s: {answered:,.0f} answered, p99 {p99:,.1f} ms", flush=True)
        if answered < 0.95 * rate or p99 > SATURATED_MS:
            failures += 1
            if failures == 2:
                return rate
        else:
            failures, rate = 0, rate * RATE_STEP
    return None


def measure(report: Report, servers: dict[str, Server], seconds: float, rounds: int) -> None:
    """Find where the server that does not batch saturates; compare both up to there."""
    load = Load(servers["one by one"])
    saturation = find_saturation(servers["one by one"], load, seconds)
    if saturation is None:
        report.miss(f"saturation: {MAX_RATE:,.0f} requests a second are no load")
        return
    rows: dict[str, Quantity] = {}

    def row(name: str, unit: str, higher_is_better: bool = False) -> Quantity:
        empty: dict[str, list[float]] = {system: [] for system in servers}
        return rows.setdefault(name, Quantity(name, unit, empty, higher_is_better))

    for number in range(rounds):
        for share in SHARES:
            rate = share * saturation
            requests = load.requests(rate, seconds, seed=number)
            for system, server in servers.items():
                p50, p99, answered = embed(server, requests)
                row(f"{rate:,.0f} req/s, p50", "ms").samples[system].append(p50)
                row(f"{rate:,.0f} req/s, p99", "ms").samples[system].append(p99)
                row(f"{rate:,.0f} req/s, answered", "req/s", True).samples[system].append(answered)
    for quantity in rows.values():
        report.add(quantity)


def main() -> None:
    """Run."""
    options = parser(__doc__, rounds=3)
    options.add_argument("--seconds", type=float, default=2, help="of each load")
    args = options.parse_args()
    report = Report("batching", args)
    if "tokenizer_max_batch_size" not in {f.name for f in dataclasses.fields(ServerConfig)}:
        report.miss("batches: this version has no --tokenizer-max-batch-size")
    else:
        with ExitStack() as stack:
            systems = {"batched": (), "one by one": ONE_BY_ONE}
            servers = {
                name: stack.enter_context(headrace(str(encoder_folder()), *COMMON, *flags))
                for name, flags in systems.items()
            }
            measure(report, servers, args.seconds, args.rounds)
    report.finish()


if __name__ == "__main__":
    main()
