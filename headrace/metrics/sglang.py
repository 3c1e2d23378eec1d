"""The board as SGLang's metrics: its names and buckets, for `--metrics-dialect sglang`.

There is one scheduler here and no rank but 0. `is_streaming`, a label of its newest versions, is
left out: the engine does not know it.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

from prometheus_client import Metric
from prometheus_client.registry import Collector

from headrace.board import histogram_bounds
from headrace.board.board import Board, Timing
from headrace.board.fields import EngineField
from headrace.board.model_status import engines_of
from headrace.config.process_configs import ModelCard
from headrace.metrics.family_builder import BoardTotals, Families, Labels, merged

# Histograms: name, the role that keeps it, bucket bounds.
HISTOGRAMS = [
    (
        "time_to_first_token_seconds",
        "From a request's head to its first text",
        "frontend",
        Timing.FIRST_TOKEN,
        histogram_bounds.SGLANG_FIRST_TOKEN,
    ),
    (
        "e2e_request_latency_seconds",
        "From a request's head to its last byte",
        "frontend",
        Timing.WHOLE,
        histogram_bounds.SGLANG_REQUEST,
    ),
    (
        "inter_token_latency_seconds",
        "From one piece of a text to the next",
        "engine",
        Timing.BETWEEN,
        histogram_bounds.SGLANG_TOKEN,
    ),
    (
        "request_time_per_output_token_seconds",
        "Mean time between a sequence's tokens",
        "engine",
        Timing.PER_TOKEN,
        histogram_bounds.SGLANG_TOKEN,
    ),
    (
        "prompt_tokens_histogram",
        "Tokens of a sequence's prompt",
        "engine",
        Timing.PROMPT,
        histogram_bounds.SGLANG_TOKENS,
    ),
    (
        "uncached_prompt_tokens_histogram",
        "Tokens of a sequence's prompt that no cache had",
        "engine",
        Timing.COMPUTED,
        histogram_bounds.SGLANG_TOKENS,
    ),
    (
        "generation_tokens_histogram",
        "Tokens generated for a sequence",
        "engine",
        Timing.GENERATED,
        histogram_bounds.SGLANG_TOKENS,
    ),
]


class SglangCollector(Collector):
    """SGLang's families, by the component that reports them there: front end or scheduler.

    A front end's counters are a model's, engines that have left included. A scheduler's families
    are an engine's: `dp_rank` is its
    place among replicas, in a server of several engines.
    """

    def __init__(self, board: Board, cards: Sequence[ModelCard]) -> None:
        ranks = {"tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
        self._models, self._engines = [], []
        is_single = len(board.occupied("engine")) == 1
        for model, card in enumerate(cards):
            engines = engines_of(board, model)
            labels = {"model_name": card.name, "engine_type": "unified"}
            self._models.append((BoardTotals.of_model(board, model), Families("sglang:", labels)))
            for rank, slot in enumerate(engines):
                if board.is_vacant(slot):
                    continue
                own = labels | ranks | ({} if is_single else {"dp_rank": str(rank)})
                self._engines.append((BoardTotals([slot]), Families("sglang:", own), card))

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        yield from merged(chain.from_iterable(front_families(*one) for one in self._models))
        yield from merged(chain.from_iterable(scheduler_families(*one) for one in self._engines))


def scheduler_families(
    readings: BoardTotals, families: Families, card: ModelCard
) -> Iterator[Metric]:
    """Yield what the scheduler of an engine reports."""
    engine = readings.engine
    pages, page_tokens = engine(EngineField.PAGES_TOTAL), engine(EngineField.PAGE_TOKENS)
    free, total = engine(EngineField.PAGES_FREE) * page_tokens, pages * page_tokens
    hits, queries = engine(EngineField.PREFIX_HITS), engine(EngineField.PREFIX_QUERIES)
    rounds, right = engine(EngineField.DRAFT_ROUNDS), engine(EngineField.RIGHT_DRAFTS)
    speed = engine(EngineField.TOKENS_PER_SECOND) if engine(EngineField.RUNNING) else 0
    for name, help, value in [
        ("num_running_reqs", "Sequences that run", engine(EngineField.RUNNING)),
        ("num_queue_reqs", "Sequences that wait", engine(EngineField.WAITING)),
        ("token_usage", "Share of the KV cache in use, 0 to 1", readings.kv_usage),
        ("full_token_usage", "The same: all layers are alike", readings.kv_usage),
        ("num_used_tokens", "Tokens that the KV cache has in use", total - free),
        ("kv_used_tokens", "The same", total - free),
        ("kv_available_tokens", "Tokens that the KV cache has room for", free),
        ("max_total_num_tokens", "Tokens that the KV cache holds", total),
        ("num_pages", "Pages of the KV cache", pages),
        ("page_size", "Tokens that a page of the KV cache holds", page_tokens),
        ("context_len", "The longest sequence, tokens", card.max_model_len),
        ("cache_hit_rate", "Share of prompts' tokens found, so far", share(hits, queries)),
        ("gen_throughput", "Tokens generated per second, lately", speed),
        (
            "spec_accept_length",
            "Tokens of a step with guesses, the one drawn included, so far",
            share(right + rounds, rounds),
        ),
        (
            "spec_accept_rate",
            "Share of guesses that were right, so far",
            share(right, engine(EngineField.DRAFTS)),
        ),
    ]:
        yield families.gauge(name, help, [({}, value)])
    yield from scheduler_counters(readings, families)
    waited = readings.spread("engine", Timing.WAITED)
    help = "From a sequence's arrival to its first step"
    yield families.histogram("queue_time_seconds", help, waited, histogram_bounds.SGLANG_QUEUE)


def scheduler_counters(readings: BoardTotals, families: Families) -> Iterator[Metric]:
    """Yield the counters of an engine's scheduler."""
    engine = readings.engine
    modes: list[tuple[Labels, float]] = [
        ({"mode": "prefill_compute"}, engine(EngineField.PREFILLED_TOKENS)),
        ({"mode": "prefill_cache"}, engine(EngineField.CACHED_TOKENS)),
        ({"mode": "decode"}, engine(EngineField.GENERATED_TOKENS)),
    ]
    yield families.counter("realtime_tokens", "Tokens, by what was done", modes)
    retracted = engine(EngineField.PREEMPTIONS)
    help = "Sequences whose KV pages were taken back"
    yield families.counter("num_retracted_requests", help, [({}, retracted)])


def front_families(readings: BoardTotals, families: Families) -> Iterator[Metric]:
    """Yield what the front end reports of a model."""
    engine = readings.engine
    computed, cached = engine(EngineField.PREFILLED_TOKENS), engine(EngineField.CACHED_TOKENS)
    generated, aborted = engine(EngineField.GENERATED_TOKENS), engine(EngineField.ABORTED)
    ended = engine(EngineField.FINISHED) + aborted
    for name, help, value in [
        ("prompt_tokens", "Tokens of prompts that have a first token", computed + cached),
        ("generation_tokens", "Tokens generated", generated),
        ("num_requests", "Sequences that ended", ended),
        ("num_aborted_requests", "Sequences whose client left", aborted),
        (
            "spec_verify_calls",
            "Steps of sequences with guesses",
            engine(EngineField.DRAFT_ROUNDS),
        ),
    ]:
        yield families.counter(name, help, [({}, value)])
    source = {"cache_source": "device"}
    yield families.counter(
        "cached_tokens", "Tokens of prompts found in the cache", [(source, cached)]
    )
    for name, help, role, span, bounds in HISTOGRAMS:
        yield families.histogram(name, help, readings.spread(role, span), bounds)


def share(part: int, whole: int) -> float:
    """Return a part of a whole; 0 of nothing."""
    return part / whole if whole else 0.0
