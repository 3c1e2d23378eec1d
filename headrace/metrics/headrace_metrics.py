"""The board as Prometheus text. Any process can render it; the frontend never does.

Families called `headrace:` tell of each process. Those that tell of the server as vLLM or SGLang
would are beside them, in the dialect that is asked for.
"""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from headrace.board.backlog import frontend_backlog, tokenizer_backlog
from headrace.board.board import Board, Counts, Slot, State, Timing
from headrace.board.fields import (
    BoardField,
    CommonField,
    DetokenizerField,
    EngineField,
    FetcherField,
    FrontendField,
    TokenizerField,
    VisionField,
)
from headrace.board.histogram import HistogramSum
from headrace.board.histogram_bounds import HEADRACE
from headrace.board.model_status import ModelState, engines_of, model_status
from headrace.board.replicas import count_replicas
from headrace.config.process_configs import ModelCard
from headrace.ipc.adapter_registry import AdapterRegistry
from headrace.metrics.exposition import Exposition, HistogramFamily
from headrace.metrics.http import SglangHttpCollector, VllmHttpCollector
from headrace.metrics.kv_store_metrics import KvStoreCollector
from headrace.metrics.lora import LoraCollector
from headrace.metrics.process_labels import LABELS, ProcessLabels
from headrace.metrics.sglang import SglangCollector
from headrace.metrics.vllm import VllmCollector
from headrace.system.procfs import vitals_of

COUNTERS: list[tuple[str, str, BoardField]] = [
    ("http_requests", "HTTP requests read", FrontendField.REQUESTS),
    ("http_responses", "HTTP responses written whole", FrontendField.RESPONSES),
    ("http_disconnects", "Clients that left before the end", FrontendField.DISCONNECTS),
    ("http_overloads", "Requests refused unread, for overload", FrontendField.OVERLOADS),
    ("http_partings", "Connections ended: bad HTTP, too slow, many", FrontendField.PARTINGS),
    ("http_unauthorized", "Requests without a valid key", FrontendField.UNAUTHORIZED),
    ("http_received_bytes", "Bytes of request bodies", FrontendField.BYTES_IN),
    ("http_sent_bytes", "Bytes of response bodies", FrontendField.BYTES_OUT),
    ("tokenizer_requests", "Requests handled", TokenizerField.HANDLED),
    ("tokenizer_refusals", "Requests refused", TokenizerField.REFUSED),
    ("tokenizer_abandoned", "Requests whose clients had left", TokenizerField.ABANDONED),
    ("prompt_tokens", "Prompt tokens received", TokenizerField.PROMPT_TOKENS),
    ("lost_reports", "Requests missing in access log and traces", FrontendField.LOST_REPORTS),
    (
        "routing_prefix_requests",
        "Requests routed to the replica with most of their prompt in its cache",
        TokenizerField.PREFIX_ROUTED,
    ),
    (
        "routing_load_requests",
        "Requests routed to the replica with the least to compute",
        TokenizerField.LOAD_ROUTED,
    ),
    (
        "routing_resumed_requests",
        "Requests routed back to their replica after a death",
        TokenizerField.RESUME_ROUTED,
    ),
    (
        "routing_cached_tokens",
        "Tokens of prompts in the cache of the replica they went to",
        TokenizerField.ROUTED_CACHED_TOKENS,
    ),
    ("images", "Images in requests", TokenizerField.IMAGES),
    ("images_found", "Images that need not be prepared again", TokenizerField.FOUND_IMAGES),
    ("engine_steps", "Steps executed", EngineField.STEPS),
    ("engine_steps_ahead", "Steps sent while another was run", EngineField.STEPS_AHEAD),
    ("computed_tokens", "Tokens run through the model", EngineField.COMPUTED_TOKENS),
    ("generation_tokens", "Tokens generated", EngineField.GENERATED_TOKENS),
    ("num_preemptions", "Sequences whose pages were taken back", EngineField.PREEMPTIONS),
    ("prefix_cache_queries", "Tokens looked up", EngineField.PREFIX_QUERIES),
    ("prefix_cache_hits", "Tokens found", EngineField.PREFIX_HITS),
    ("kv_pages_recovered", "Full pages kept beyond a death", EngineField.RECOVERED_PAGES),
    ("encoder_cache_queries", "Images of prompts", EngineField.EMBEDDING_QUERIES),
    ("encoder_cache_hits", "Those encoded before", EngineField.EMBEDDING_HITS),
    ("encoded_images", "Images encoded", VisionField.ENCODED_IMAGES),
    ("encoder_batches", "Calls of the tower for them", VisionField.ENCODER_BATCHES),
    ("encoder_store_hits", "Images that the KV store had", VisionField.STORE_HITS),
    ("fetched_images", "Images fetched by their URLs", FetcherField.FETCHED_IMAGES),
    ("fetch_refusals", "Requests whose images were not", FetcherField.FETCH_REFUSALS),
    ("spec_decode_num_draft_tokens", "Tokens guessed", EngineField.DRAFTS),
    ("spec_decode_num_accepted_tokens", "Guesses right", EngineField.RIGHT_DRAFTS),
    ("queue_refusals", "Requests refused, the queue being full", EngineField.QUEUE_REFUSALS),
    ("aborted_sequences", "Sequences aborted", EngineField.ABORTED),
    ("lapsed_requests", "Requests whose lease lapsed", EngineField.LAPSED),
    ("finished_sequences", "Sequences run to their end", EngineField.FINISHED),
    ("detokenized_tokens", "Tokens turned into text", DetokenizerField.TOKENS),
]
BY_MODEL = {  # what processes that serve several models count for each
    "prompt_tokens",
    "routing_prefix_requests",
    "routing_load_requests",
    "routing_resumed_requests",
    "routing_cached_tokens",
    "detokenized_tokens",
}
GAUGES: list[tuple[str, str, BoardField]] = [
    ("http_requests_open", "HTTP requests in progress", FrontendField.OPEN_REQUESTS),
    ("http_connections", "Open connections", FrontendField.CONNECTIONS),
    ("http_held_bytes", "Bytes of bodies being read", FrontendField.HELD_BYTES),
    ("http_unsent_bytes", "Bytes clients have yet to read", FrontendField.UNSENT_BYTES),
    ("image_bytes", "Bytes of prepared images", TokenizerField.IMAGE_BYTES),
    ("image_bytes_sent", "Of those the engine needs", TokenizerField.SENT_IMAGE_BYTES),
    ("num_requests_running", "Sequences in the running batch", EngineField.RUNNING),
    ("num_requests_waiting", "Sequences waiting for a place", EngineField.WAITING),
    ("num_tokens_waiting", "Tokens to compute of those", EngineField.WAITING_TOKENS),
    ("prefill_rate", "Tokens a second of steps with prompts", EngineField.PREFILL_RATE),
    ("kv_pages", "Pages of the KV cache", EngineField.PAGES_TOTAL),
    ("kv_pages_total", "As kv_pages; goes with the next release", EngineField.PAGES_TOTAL),
    ("kv_pages_free", "Free pages of the KV cache", EngineField.PAGES_FREE),
    ("state_slots", "Slots for the states of sequences", EngineField.STATES_TOTAL),
    ("state_slots_free", "Those that no sequence uses", EngineField.STATES_FREE),
    ("num_images_waiting", "Images to be encoded", EngineField.WAITING_IMAGES),
    ("embedding_rows", "Rows for embeddings of images", EngineField.EMBEDDING_ROWS),
    (
        "embedding_rows_total",
        "As embedding_rows; goes with the next release",
        EngineField.EMBEDDING_ROWS,
    ),
    ("embedding_rows_free", "Those that no sequence needs", EngineField.EMBEDDING_ROWS_FREE),
    ("replies_open", "Responses being rendered", DetokenizerField.OPEN_RESPONSES),
]
REPLICAS = [  # as in `ReplicaCount`
    ("replicas_wanted", "Engines that a model is to have"),
    ("replicas_ready", "Those that serve"),
    ("replicas_leaving", "Engines that end their last requests"),
]
LOAD_GAUGES = [
    ("models_loaded", "Whether an engine of the model serves"),
    ("models_waiting", "Sequences that wait for an engine of the model"),
    ("models_asleep", "Whether all engines of the model sleep"),
]
LOAD_COUNTERS = [
    ("models_loads", "Loads of the model, but that of the start", EngineField.LOADS),
    ("models_failed_loads", "Loads that failed", EngineField.FAILED_LOADS),
]
HISTOGRAMS = [
    ("event_loop_lag_seconds", "How late timers fire", Timing.LOOP_LAG),
    ("time_to_first_token_seconds", "From the head read to the first text", Timing.FIRST_TOKEN),
    ("e2e_request_latency_seconds", "From the head read to the last byte", Timing.WHOLE),
]
HOPS = [span for span in Timing if Timing.ACCEPT <= span <= Timing.WRITE]
DIALECTS = {"vllm": VllmCollector, "sglang": SglangCollector}
HTTP_DIALECTS = {"vllm": VllmHttpCollector, "sglang": SglangHttpCollector}
VITALS = [
    (CounterMetricFamily, "process_cpu_seconds", "Processor time of all threads", "cpu_s"),
    (
        CounterMetricFamily,
        "process_busy_seconds",
        "Processor time of the thread that does the work",
        "busy_s",
    ),
    (GaugeMetricFamily, "process_resident_memory_bytes", "Memory in use", "resident_bytes"),
]


class BoardCollector(Collector):
    """Reads every slot."""

    def __init__(self, board: Board, labels: ProcessLabels) -> None:
        self._board = board
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        up = GaugeMetricFamily("headrace:process_up", "Whether the process serves", labels=LABELS)
        for slot in self._board.occupied():
            up.add_metric(self._labels.of(slot), slot[CommonField.STATE] == State.READY)
        yield up
        restarts = CounterMetricFamily(
            "headrace:process_restarts",
            "Processes started in a seat after its first",
            labels=LABELS,
        )
        for slot in self._board.occupied():
            restarts.add_metric(self._labels.of(slot), max(slot[CommonField.STARTS], 1) - 1)
        yield restarts
        for name, help, field in COUNTERS:
            counter = CounterMetricFamily(f"headrace:{name}", help, labels=LABELS)
            for slot in self._board.occupied(field.role):
                for labels, counts in self._rows(slot, name in BY_MODEL):
                    counter.add_metric(labels, counts[field])
            yield counter
        for name, help, field in GAUGES:
            gauge = GaugeMetricFamily(f"headrace:{name}", help, labels=LABELS)
            for slot in self._board.occupied(field.role):
                gauge.add_metric(self._labels.of(slot), slot[field])
            yield gauge
        yield from self._histograms()
        longest = GaugeMetricFamily(
            "headrace:event_loop_longest_callback_seconds",
            "Processor time of the longest callback so far, at most",
            labels=LABELS,
        )
        for slot in self._board.of("frontend"):
            seconds = slot[FrontendField.LONGEST_CALLBACK_NS] / 1e9
            longest.add_metric(self._labels.of(slot), seconds)
        yield longest
        usage = GaugeMetricFamily(
            "headrace:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1", labels=LABELS
        )
        for slot in self._board.occupied("engine"):
            total = slot[EngineField.PAGES_TOTAL]
            used = 1 - slot[EngineField.PAGES_FREE] / total if total else 0.0
            usage.add_metric(self._labels.of(slot), used)
        yield usage
        yield from self._replicas()
        yield from self._loads()
        yield from self._backlogs()
        yield from self._vitals()

    def _replicas(self) -> Iterator[Metric]:
        """How many engines each model has."""
        families = [
            GaugeMetricFamily(f"headrace:{name}", help, labels=["model_name"])
            for name, help in REPLICAS
        ]
        for model, name in enumerate(self._labels.names):
            counts = count_replicas(engines_of(self._board, model))
            for family, count in zip(families, counts, strict=True):
                family.add_metric([name], count)
        yield from families

    def _loads(self) -> Iterator[Metric]:
        """Which models are loaded, how many sequences wait for them, and how often they came."""
        loaded, waiting, asleep = (
            GaugeMetricFamily(f"headrace:{name}", help, labels=["model_name"])
            for name, help in LOAD_GAUGES
        )
        loads, failures = (
            CounterMetricFamily(f"headrace:{name}", help, labels=["model_name"])
            for name, help, _ in LOAD_COUNTERS
        )
        for model, name in enumerate(self._labels.names):
            status = model_status(self._board, model)
            loaded.add_metric([name], status.state is ModelState.LOADED)
            waiting.add_metric([name], status.num_waiting)
            asleep.add_metric([name], status.is_asleep)
            engines = engines_of(self._board, model)
            for family, (_, _, field) in zip((loads, failures), LOAD_COUNTERS, strict=True):
                family.add_metric([name], sum(slot[field] for slot in engines))
        yield from (loaded, waiting, asleep, loads, failures)

    def _backlogs(self) -> Iterator[Metric]:
        """Backlogs: bodies sent to tokenizer processes, messages sent to frontends."""
        bodies = GaugeMetricFamily(
            "headrace:tokenizer_queue_bytes",
            "Bytes of bodies sent to a tokenizer and not handled",
            labels=LABELS,
        )
        for place, slot in enumerate(self._board.of("tokenizer")):
            backlog = tokenizer_backlog(self._board, place)
            bodies.add_metric(self._labels.of(slot), max(backlog(), 0))
        yield bodies
        messages = GaugeMetricFamily(
            "headrace:frontend_queue_messages",
            "Messages sent to a frontend and not handled",
            labels=LABELS,
        )
        for place, slot in enumerate(self._board.of("frontend")):
            backlog = frontend_backlog(self._board, place)
            messages.add_metric(self._labels.of(slot), max(backlog(), 0))
        yield messages

    def _vitals(self) -> Iterator[Metric]:
        """Kernel statistics of each live process."""
        alive = [
            s for s in self._board.slots if s[CommonField.STATE] in (State.STARTING, State.READY)
        ]
        found = [(slot, vitals_of(slot[CommonField.PID])) for slot in alive]
        for kind, name, help, attribute in VITALS:
            family = kind(f"headrace:{name}", help, labels=LABELS)
            for slot, vitals in found:
                if vitals is not None:
                    family.add_metric(self._labels.of(slot), getattr(vitals, attribute))
            yield family

    def _histograms(self) -> Iterator[Metric]:
        for name, help, span in HISTOGRAMS:
            family = HistogramFamily(f"headrace:{name}", help, LABELS)
            self._add(family, span)
            yield family
        timings = HistogramFamily(
            "headrace:request_hop_seconds",
            "How long requests take from each part of the ring to the next",
            labels=[*LABELS, "hop"],
        )
        for span in HOPS:
            self._add(timings, span, span.name.lower())
        yield timings

    def _add(self, family: HistogramFamily, span: Timing, *labels: str) -> None:
        for slot in self._board.of("frontend"):
            for own, counts in self._rows(slot, span != Timing.LOOP_LAG):
                histogram_sum = HistogramSum([counts.histogram(span)])
                family.add([*own, *labels], histogram_sum, HEADRACE)

    def _rows(self, slot: Slot, is_by_model: bool) -> Iterable[tuple[tuple[str, str], Counts]]:
        """Return labels and counts of a process, by model where it counts so."""
        return self._labels.by_model(slot) if is_by_model else [(self._labels.of(slot), slot)]


class MetricsPage:
    """The response of `/metrics`; `dialect` is one of `DIALECTS`."""

    def __init__(
        self,
        board: Board,
        cards: Sequence[ModelCard],
        dialect: str = "vllm",
        adapters: AdapterRegistry | None = None,
    ) -> None:
        labels = ProcessLabels(board, cards)
        self._board = board
        self._cards = cards
        self._dialect = DIALECTS[dialect]
        self._own: list[Collector] = [
            BoardCollector(board, labels),
            KvStoreCollector(board, labels),
        ]
        self._others: list[Collector] = [HTTP_DIALECTS[dialect](board)]
        if adapters is not None and dialect == "vllm":
            self._others.append(LoraCollector(adapters))
        self._exposition = Exposition()

    def render(self) -> bytes:
        """Return the board's values as Prometheus text."""
        return self._exposition.text(self.collect())

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        of_engines = self._dialect(self._board, self._cards)  # those that have seats now
        for collector in (*self._own, of_engines, *self._others):
            yield from collector.collect()


def render_metrics(board: Board, cards: Sequence[ModelCard], dialect: str = "vllm") -> bytes:
    """Return what `/metrics` answers, once."""
    return MetricsPage(board, cards, dialect).render()
