"""The board as vLLM's metrics: its names, labels and buckets, so that its dashboards work.

Only what this server measures is reported, and nothing is guessed. Sequences are counted where
vLLM counts them, too: each of the `n` texts of a request is one.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

from prometheus_client import Metric
from prometheus_client.registry import Collector

from headrace.board import histogram_bounds
from headrace.board.board import Board, Timing
from headrace.board.fields import DetokenizerField, EngineField, FrontendField, TokenizerField
from headrace.board.model_status import engines_of
from headrace.config.config import MAX_DRAFTS
from headrace.config.process_configs import ModelCard
from headrace.ipc.messages import FinishReason
from headrace.metrics.family_builder import BoardTotals, Families, Labels, merged
from headrace.metrics.tool_calls import labeled

IMAGES = (TokenizerField.IMAGES, TokenizerField.FOUND_IMAGES)

# Counters of the engine.
COUNTERS = [
    ("num_preemptions", "Sequences whose KV pages were taken back", EngineField.PREEMPTIONS),
    ("prompt_tokens_cached", "Tokens of prompts found in the cache", EngineField.CACHED_TOKENS),
    ("generation_tokens", "Tokens generated", EngineField.GENERATED_TOKENS),
    ("prefix_cache_queries", "Tokens looked up in the prefix cache", EngineField.PREFIX_QUERIES),
    ("prefix_cache_hits", "Tokens found in the prefix cache", EngineField.PREFIX_HITS),
    ("spec_decode_num_drafts", "Steps of sequences with guesses", EngineField.DRAFT_ROUNDS),
    ("spec_decode_num_draft_tokens", "Tokens guessed", EngineField.DRAFTS),
    ("spec_decode_num_accepted_tokens", "Guesses that were right", EngineField.RIGHT_DRAFTS),
]
# Counters of what there is none of, which vLLM always reports.
ABSENT = [
    ("external_prefix_cache_queries", "Tokens looked up on other machines: none"),
    ("external_prefix_cache_hits", "Tokens found on other machines: none"),
]
# Histograms: name, the role that keeps it, bucket bounds.
HISTOGRAMS = [
    (
        "time_to_first_token_seconds",
        "From a request's head to its first text",
        "frontend",
        Timing.FIRST_TOKEN,
        histogram_bounds.VLLM_FIRST_TOKEN,
    ),
    (
        "e2e_request_latency_seconds",
        "From a request's head to its last byte",
        "frontend",
        Timing.WHOLE,
        histogram_bounds.VLLM_REQUEST,
    ),
    (
        "inter_token_latency_seconds",
        "From one piece of a text to the next",
        "engine",
        Timing.BETWEEN,
        histogram_bounds.VLLM_TOKEN,
    ),
    (
        "request_time_per_output_token_seconds",
        "Mean time between a sequence's tokens",
        "engine",
        Timing.PER_TOKEN,
        histogram_bounds.VLLM_TOKEN,
    ),
    (
        "request_queue_time_seconds",
        "From a sequence's arrival to its first step",
        "engine",
        Timing.WAITED,
        histogram_bounds.VLLM_REQUEST,
    ),
    (
        "request_prefill_time_seconds",
        "From a sequence's first step to its first token",
        "engine",
        Timing.PREFILLED,
        histogram_bounds.VLLM_REQUEST,
    ),
    (
        "request_decode_time_seconds",
        "From a sequence's first token to its last",
        "engine",
        Timing.DECODED,
        histogram_bounds.VLLM_REQUEST,
    ),
    (
        "request_inference_time_seconds",
        "From a sequence's first step to its last token",
        "engine",
        Timing.RAN,
        histogram_bounds.VLLM_REQUEST,
    ),
    (
        "iteration_tokens_total",
        "Tokens computed in a step",
        "engine",
        Timing.STEP,
        histogram_bounds.VLLM_STEP,
    ),
    (
        "request_num_preemptions",
        "How often a sequence was preempted",
        "engine",
        Timing.PREEMPTED,
        histogram_bounds.VLLM_PREEMPTIONS,
    ),
    (
        "request_params_n",
        "How many texts were asked for a prompt",
        "tokenizer",
        Timing.N,
        histogram_bounds.VLLM_N,
    ),
]
# Histograms of tokens, up to the context's length.
TOKENS = [
    ("request_prompt_tokens", "Tokens of a sequence's prompt", Timing.PROMPT),
    (
        "request_prefill_kv_computed_tokens",
        "Tokens of a sequence's prompt that no cache had",
        Timing.COMPUTED,
    ),
    ("request_generation_tokens", "Tokens generated for a sequence", Timing.GENERATED),
    ("request_max_num_generation_tokens", "As request_generation_tokens", Timing.GENERATED),
    ("request_params_max_tokens", "Tokens that a sequence might have had", Timing.MAX_TOKENS),
]


class VllmCollector(Collector):
    """vLLM's families, by model and engine: label `engine` is its place among the replicas.

    What tokenizers and frontends measure is told apart by model alone: it has the label of a single
    engine, and with several an empty one. Requests that frontends refuse unread are of no model.
    """

    def __init__(self, board: Board, cards: Sequence[ModelCard]) -> None:
        self._engines = []
        for slot in board.occupied("engine"):
            card = cards[slot[EngineField.MODEL]]
            labels = {"model_name": card.name, "engine": str(board.replicas_of(slot).index(slot))}
            self._engines.append((BoardTotals([slot]), Families("vllm:", labels), card))
        self._models = []
        for model, card in enumerate(cards):
            num_engines = sum(not board.is_vacant(slot) for slot in engines_of(board, model))
            names = {"model_name": card.name}
            shared = Families("vllm:", names | {"engine": "" if num_engines > 1 else "0"})
            totals = BoardTotals.of_model(board, model)
            self._models.append((totals, shared, Families("vllm:", names)))
        self._frontends = BoardTotals(board.of("frontend"))
        self._is_single = len(cards) == 1

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        yield from merged(chain.from_iterable(engine_families(*one) for one in self._engines))
        yield from merged(chain.from_iterable(model_families(*one) for one in self._models))
        yield from merged(self._rejections())

    def _rejections(self) -> Iterator[Metric]:
        """Yield the requests that were refused for want of room: by engines, and unread."""
        name, help = "admission_rejections", "Requests refused for want of room"
        total = self._frontends.total
        too_many = total("frontend", FrontendField.REQUEST_OVERLOADS)
        too_long = total("frontend", FrontendField.TOKEN_OVERLOADS)
        unread = {"max_num_queued_reqs": too_many, "max_num_queued_tokens": too_long}
        for readings, _, families in self._models:
            own = {"max_num_queued_reqs": readings.engine(EngineField.QUEUE_REFUSALS)}
            if self._is_single:
                own = {reason: own.get(reason, 0) + count for reason, count in unread.items()}
            yield families.counter(name, help, by_reason(own))
        if not self._is_single:
            yield Families("vllm:", {"model_name": ""}).counter(name, help, by_reason(unread))


def by_reason(counts: dict[str, int]) -> list[tuple[Labels, float]]:
    """Return samples of refused requests."""
    return [({"reason": reason}, count) for reason, count in counts.items()]


def model_families(readings: BoardTotals, shared: Families, names: Families) -> Iterator[Metric]:
    """Yield what tokenizers, frontends and detokenizers count for a model."""
    for name, help, role, span, bounds in HISTOGRAMS:
        if role != "engine":
            yield shared.histogram(name, help, readings.spread(role, span), bounds)
    images, found = (readings.total("tokenizer", field) for field in IMAGES)
    yield shared.counter("mm_cache_queries", "Images of requests", [({}, images)])
    yield shared.counter("mm_cache_hits", "Those that were prepared before", [({}, found)])
    calls: list[tuple[Labels, float]] = [
        (labels, readings.total("detokenizer", DetokenizerField.TOOL_READINGS + place))
        for place, labels in labeled()
    ]
    help = "Answers, or events of streams, read for calls of tools"
    yield names.counter("tool_call_parser_invocations", help, calls)


def engine_families(readings: BoardTotals, families: Families, card: ModelCard) -> Iterator[Metric]:
    """Yield the families of one engine."""
    yield from engine_gauges(readings, families)
    yield from engine_counters(readings, families)
    for name, help, role, span, bounds in HISTOGRAMS:
        if role == "engine":
            yield families.histogram(name, help, readings.spread(role, span), bounds)
    tokens = tuple(b for b in histogram_bounds.VLLM_TOKENS if b <= card.max_model_len)
    for name, help, span in TOKENS:
        yield families.histogram(name, help, readings.spread("engine", span), tokens)


def engine_gauges(readings: BoardTotals, families: Families) -> Iterator[Metric]:
    """Yield the gauges of one engine."""
    engine, gauge = readings.engine, families.gauge
    running, waiting = engine(EngineField.RUNNING), engine(EngineField.WAITING)
    yield gauge("num_requests_running", "Sequences that run", [({}, running)])
    yield gauge("num_requests_waiting", "Sequences that wait", [({}, waiting)])
    yield gauge(
        "num_requests_waiting_by_reason",
        "Sequences that wait, by why: for room",
        [({"reason": "capacity"}, waiting), ({"reason": "deferred"}, 0)],
    )
    usage = readings.kv_usage
    yield gauge("kv_cache_usage_perc", "Share of KV pages in use, 0 to 1", [({}, usage)])
    pages = str(engine(EngineField.PAGES_TOTAL))
    sleeps = engine(EngineField.IS_ASLEEP)
    # Sleep is vLLM's of level 1, whose name this is. Here weights are in the CPU's memory anyway.
    states = {"awake": 1 - sleeps, "weights_offloaded": sleeps, "discard_all": 0}
    sleep: list[tuple[Labels, float]] = [({"sleep_state": s}, n) for s, n in states.items()]
    yield gauge("engine_sleep_state", "Whether the engine is awake or sleeps", sleep)
    info = {"block_size": str(engine(EngineField.PAGE_TOKENS)), "num_gpu_blocks": pages}
    yield gauge("cache_config_info", "What the KV cache is, as labels", [(info, 1)])


def engine_counters(readings: BoardTotals, families: Families) -> Iterator[Metric]:
    """Yield the counters of one engine."""
    engine, counter = readings.engine, families.counter
    for name, help, field in COUNTERS:
        yield counter(name, help, [({}, engine(field))])
    computed, cached = engine(EngineField.PREFILLED_TOKENS), engine(EngineField.CACHED_TOKENS)
    help = "Tokens of prompts that have a first token"
    yield counter("prompt_tokens", help, [({}, computed + cached)])
    sources: list[tuple[Labels, float]] = [
        ({"source": "local_compute"}, computed),
        ({"source": "local_cache_hit"}, cached),
        ({"source": "external_kv_transfer"}, 0),
    ]
    yield counter("prompt_tokens_by_source", "Where prompts' keys came from", sources)
    by_tier: list[tuple[Labels, float]] = [({"source": "device"}, cached)]
    yield counter("prompt_tokens_cached_by_source", "Where cached tokens were", by_tier)
    for name, help in ABSENT:
        yield counter(name, help, [({}, 0)])
    ends = {
        "stop": engine(EngineField.ENDED + FinishReason.STOP),
        "length": engine(EngineField.ENDED + FinishReason.LENGTH),
        "abort": engine(EngineField.ABORTED),
        "error": 0,  # an error ends the server, too
        "repetition": 0,  # is not detected here
    }
    reasons: list[tuple[Labels, float]] = [({"finished_reason": r}, n) for r, n in ends.items()]
    yield counter("request_success", "Sequences that ended, by why", reasons)
    right: list[tuple[Labels, float]] = [
        ({"position": str(place)}, engine(EngineField.RIGHT_AT + place))
        for place in range(MAX_DRAFTS)
    ]
    help = "Right guesses, by place"
    yield counter("spec_decode_num_accepted_tokens_per_pos", help, right)
