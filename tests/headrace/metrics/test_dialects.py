"""Dashboards of vLLM and SGLang find here what they look for: names, labels and buckets."""

from dataclasses import replace

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from headrace.board.board import Board, Seat, Timing
from headrace.board.fields import (
    DetokenizerField,
    EngineField,
    FrontendField,
    Seating,
    TokenizerField,
)
from headrace.config.config import MAX_DRAFTS
from headrace.config.process_configs import ModelCard
from headrace.ipc.messages import FinishReason
from headrace.metrics.headrace_metrics import render_metrics
from headrace.metrics.tool_calls import READINGS

SEATS = [Seat("frontend", 0), Seat("frontend", 1), Seat("tokenizer", 0), Seat("engine", 0)]
CARD = ModelCard(
    path="",
    name="org/tiny",
    max_model_len=300,
    vocab_size=1,
    eos_token_ids=[],
    chat_template=None,
    special_tokens={},
)
# As vllm/v1/metrics/loggers.py of vLLM 0.33 and its buckets have them, as text.
VLLM_LABELS = {"model_name": "org/tiny", "engine": "0"}
FIRST_TOKEN = (
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 "
    "160.0 640.0 2560.0 +Inf"
)
TOKEN = (
    "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 +Inf"
)
REQUEST = (
    "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 "
    "1920.0 7680.0 +Inf"
)
TOKENS = "1.0 2.0 5.0 10.0 20.0 50.0 100.0 200.0 +Inf"  # to the context's 300
VLLM_BUCKETS = {
    "time_to_first_token_seconds": FIRST_TOKEN,
    "inter_token_latency_seconds": TOKEN,
    "request_time_per_output_token_seconds": TOKEN,
    "e2e_request_latency_seconds": REQUEST,
    "request_queue_time_seconds": REQUEST,
    "request_inference_time_seconds": REQUEST,
    "request_prefill_time_seconds": REQUEST,
    "request_decode_time_seconds": REQUEST,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "request_max_num_generation_tokens": TOKENS,
    "request_params_max_tokens": TOKENS,
    "request_prefill_kv_computed_tokens": TOKENS,
    "request_params_n": "1.0 2.0 5.0 10.0 20.0 +Inf",
    "request_num_preemptions": "1.0 2.0 3.0 4.0 5.0 10.0 20.0 +Inf",
    "iteration_tokens_total": (
        "1.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 2048.0 4096.0 8192.0 16384.0 +Inf"
    ),
}
# By the words of the engine's slot that they show.
VLLM_COUNTERS = {
    "num_preemptions": EngineField.PREEMPTIONS,
    "prompt_tokens_cached": EngineField.CACHED_TOKENS,
    "generation_tokens": EngineField.GENERATED_TOKENS,
    "prefix_cache_queries": EngineField.PREFIX_QUERIES,
    "prefix_cache_hits": EngineField.PREFIX_HITS,
    "spec_decode_num_drafts": EngineField.DRAFT_ROUNDS,
    "spec_decode_num_draft_tokens": EngineField.DRAFTS,
    "spec_decode_num_accepted_tokens": EngineField.RIGHT_DRAFTS,
}
# As sglang's metrics_collector.py of 0.5 has them.
SGLANG_RANKS = {"tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
SGLANG_BUCKETS = {
    "time_to_first_token_seconds": (
        "0.1 0.2 0.4 0.6 0.8 1.0 2.0 4.0 6.0 8.0 10.0 20.0 40.0 60.0 80.0 100.0 200.0 400.0 +Inf"
    ),
    "e2e_request_latency_seconds": (
        "0.1 0.2 0.4 0.6 0.8 1.0 2.0 4.0 6.0 8.0 10.0 20.0 40.0 60.0 80.0 100.0 200.0 400.0 600.0 "
        "1200.0 1800.0 2400.0 +Inf"
    ),
    "inter_token_latency_seconds": (
        "0.002 0.004 0.006 0.008 0.01 0.015 0.02 0.025 0.03 0.035 0.04 0.06 0.08 0.1 0.2 0.4 0.6 "
        "0.8 1.0 2.0 4.0 6.0 8.0 +Inf"
    ),
    "prompt_tokens_histogram": (
        "100.0 300.0 500.0 700.0 1000.0 1500.0 2000.0 3000.0 4000.0 5000.0 6000.0 7000.0 8000.0 "
        "9000.0 10000.0 12500.0 15000.0 17500.0 20000.0 22500.0 25000.0 27500.0 30000.0 35000.0 "
        "40000.0 60000.0 80000.0 100000.0 200000.0 300000.0 400000.0 600000.0 800000.0 1e+06 "
        "1.1e+06 +Inf"
    ),
}


@pytest.fixture
def board() -> Board:
    return Board.create(SEATS)


def families(board: Board, dialect: str) -> dict[str, Metric]:
    """Return the families of a dialect, by their name without its prefix."""
    text = render_metrics(board, [CARD], dialect).decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    others = {"vllm", "sglang"} - {dialect}
    assert not [name for name in found if name.split(":")[0] in others]
    prefix = f"{dialect}:"
    return {name.removeprefix(prefix): f for name, f in found.items() if name.startswith(prefix)}


@pytest.mark.parametrize(
    ("dialect", "name", "labels"),
    [("vllm", "num_preemptions", "engine"), ("sglang", "num_retracted_requests", "dp_rank")],
)
def test_engines_of_several_models_are_told_apart(dialect: str, name: str, labels: str) -> None:
    board = Board.create([Seat("engine", index) for index in range(3)])
    for slot in board.of("engine"):
        slot[EngineField.MODEL] = min(slot.seat.index, 1)
        slot[EngineField.PREEMPTIONS] = 5 + slot.seat.index
    text = render_metrics(board, [CARD, replace(CARD, name="other")], dialect).decode()
    families = {one.name: one for one in text_string_to_metric_families(text)}
    found = [
        (sample.labels["model_name"], sample.labels.get(labels), sample.value)
        for sample in families[f"{dialect}:{name}"].samples
    ]
    assert found == [(CARD.name, "0", 5), ("other", "0", 6), ("other", "1", 7)]


def test_totals_of_a_model_outlive_its_engines() -> None:
    board = Board.create([Seat("engine", index) for index in range(3)])
    for slot in board.of("engine"):
        slot[EngineField.GENERATED_TOKENS] = 5 + slot.seat.index
    board.slot("engine")[EngineField.SEATING] = Seating.VACANT
    found = families(board, "sglang")
    assert value(found["generation_tokens"]) == 5 + 6 + 7
    ranks = [s.labels["dp_rank"] for s in found["num_retracted_requests"].samples]
    assert ranks == ["1", "2"]


def bounds(family: Metric) -> str:
    return " ".join(s.labels["le"] for s in family.samples if "le" in s.labels)


def value(family: Metric, **labels: str) -> float:
    (sample,) = (s for s in family.samples if s.labels.items() >= labels.items())
    return sample.value


def buckets(family: Metric) -> dict[str, float]:
    return {s.labels["le"]: s.value for s in family.samples if "le" in s.labels}


def test_vllms_histograms_have_its_buckets_and_labels(board: Board) -> None:
    found = families(board, "vllm")
    kinds = {name for name, family in found.items() if family.type == "histogram"}
    assert kinds == VLLM_BUCKETS.keys()
    for name, expected in VLLM_BUCKETS.items():
        assert bounds(found[name]) == expected, name
        for sample in found[name].samples:
            assert {k: v for k, v in sample.labels.items() if k != "le"} == VLLM_LABELS


def test_vllms_counters_show_their_fields(board: Board) -> None:
    slot = board.slot("engine")
    for number, field in enumerate(VLLM_COUNTERS.values(), 1):
        slot[field] = 100 * number
    found = families(board, "vllm")
    for number, name in enumerate(VLLM_COUNTERS, 1):
        assert found[name].type == "counter"
        assert [s.name for s in found[name].samples] == [f"vllm:{name}_total"]
        assert value(found[name], **VLLM_LABELS) == 100 * number, name


def test_vllms_gauges_tell_of_the_queue_and_the_cache(board: Board) -> None:
    slot = board.slot("engine")
    slot[EngineField.RUNNING], slot[EngineField.WAITING] = 3, 4
    slot[EngineField.PAGES_TOTAL], slot[EngineField.PAGES_FREE], slot[EngineField.PAGE_TOKENS] = (
        8,
        6,
        16,
    )
    found = families(board, "vllm")
    assert value(found["num_requests_running"], **VLLM_LABELS) == 3
    assert value(found["num_requests_waiting"], **VLLM_LABELS) == 4
    assert value(found["num_requests_waiting_by_reason"], reason="capacity") == 4
    assert value(found["num_requests_waiting_by_reason"], reason="deferred") == 0
    assert value(found["kv_cache_usage_perc"], **VLLM_LABELS) == 0.25
    info = {"block_size": "16", "num_gpu_blocks": "8", "engine": "0"}
    assert value(found["cache_config_info"], **info) == 1


def test_a_model_that_sleeps_is_not_awake(board: Board) -> None:
    def states() -> dict[str, float]:
        samples = families(board, "vllm")["engine_sleep_state"].samples
        return {sample.labels["sleep_state"]: sample.value for sample in samples}

    assert states() == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    board.slot("engine")[EngineField.IS_ASLEEP] = 1
    assert states() == {"awake": 0, "weights_offloaded": 1, "discard_all": 0}


def test_tool_call_readings_are_labeled_by_request_and_result() -> None:
    seats = [*SEATS, Seat("detokenizer", 0), Seat("detokenizer", 1)]
    board = Board.create(seats)
    for index in range(2):
        for place in range(len(READINGS)):
            board.slot("detokenizer", index)[DetokenizerField.TOOL_READINGS + place] = (
                10 * place + index
            )
    found = families(board, "vllm")["tool_call_parser_invocations"]
    assert {s.name for s in found.samples} == {"vllm:tool_call_parser_invocations_total"}
    assert found.type == "counter"
    for place, (mode, outcome, request_type) in enumerate(READINGS):
        labels = {"mode": mode, "outcome": outcome, "request_type": request_type}
        (sample,) = (s for s in found.samples if s.labels.items() >= labels.items())
        assert sample.labels == labels | {"model_name": "org/tiny"}
        assert sample.value == 20 * place + 1
    assert ("streaming", "tool_call", "responses") in READINGS


def test_prompts_and_ends_are_counted_by_their_kind(board: Board) -> None:
    slot = board.slot("engine")
    slot[EngineField.PREFILLED_TOKENS], slot[EngineField.CACHED_TOKENS] = 70, 30
    slot[EngineField.ENDED + FinishReason.STOP], slot[EngineField.ENDED + FinishReason.LENGTH] = (
        5,
        6,
    )
    slot[EngineField.ABORTED] = 7
    tokenizer = board.slot("tokenizer")
    tokenizer[TokenizerField.IMAGES], tokenizer[TokenizerField.FOUND_IMAGES] = 9, 4
    slot[EngineField.RIGHT_AT + 2] = 8
    found = families(board, "vllm")
    assert value(found["prompt_tokens"]) == 100
    sources = found["prompt_tokens_by_source"]
    assert value(sources, source="local_compute") == 70
    assert value(sources, source="local_cache_hit") == 30
    assert value(found["prompt_tokens_cached_by_source"], source="device") == 30
    assert value(found["external_prefix_cache_hits"]) == 0
    assert [value(found[f"mm_cache_{name}"]) for name in ("queries", "hits")] == [9, 4]
    ends = {s.labels["finished_reason"]: s.value for s in found["request_success"].samples}
    assert ends == {"stop": 5, "length": 6, "abort": 7, "error": 0, "repetition": 0}
    assert value(found["spec_decode_num_accepted_tokens_per_pos"], position="2") == 8


def test_rejections_are_counted_by_their_limit(board: Board) -> None:
    for index in range(2):
        board.slot("frontend", index)[FrontendField.REQUEST_OVERLOADS] = 2
        board.slot("frontend", index)[FrontendField.TOKEN_OVERLOADS] = 3
    board.slot("engine")[EngineField.QUEUE_REFUSALS] = 5
    refused = families(board, "vllm")["admission_rejections"]
    assert value(refused, reason="max_num_queued_reqs") == 9
    assert value(refused, reason="max_num_queued_tokens") == 6
    assert refused.samples[0].labels.keys() == {"model_name", "reason"}


def test_there_is_a_word_for_every_place_of_a_guess() -> None:
    assert EngineField.RIGHT_AT + MAX_DRAFTS <= 64


def test_what_several_frontends_saw_is_one_histogram(board: Board) -> None:
    for index, ms in enumerate((50, 300)):
        board.slot("frontend", index).histogram(Timing.FIRST_TOKEN).observe(ms * 10**6)
    first = families(board, "vllm")["time_to_first_token_seconds"]
    assert (buckets(first)["0.06"], buckets(first)["0.25"], buckets(first)["0.5"]) == (1, 1, 2)
    assert [s.value for s in first.samples if s.name.endswith("_sum")] == pytest.approx([0.35])
    assert [s.value for s in first.samples if s.name.endswith("_count")] == [2]


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_what_frontends_measure_is_told_apart_by_model(dialect: str) -> None:
    board = Board.create([*SEATS, Seat("engine", 1), Seat("detokenizer", 0)])
    board.slot("engine", 1)[EngineField.MODEL] = 1
    for model, times in enumerate((2, 5)):
        for index in range(2):
            counts = board.slot("frontend", index).of_model(model)
            counts.histogram(Timing.FIRST_TOKEN).observe(10**6, times)
    text = render_metrics(board, [CARD, replace(CARD, name="other")], dialect).decode()
    found = {one.name: one for one in text_string_to_metric_families(text)}
    first = found[f"{dialect}:time_to_first_token_seconds"].samples
    counts = {s.labels["model_name"]: s.value for s in first if s.name.endswith("_count")}
    assert counts == {CARD.name: 4, "other": 10}


def test_requests_refused_unread_are_of_no_model_of_several() -> None:
    board = Board.create([*SEATS, Seat("engine", 1)])
    board.slot("engine", 1)[EngineField.MODEL] = 1
    board.slot("frontend")[FrontendField.REQUEST_OVERLOADS] = 2
    board.slot("engine", 1)[EngineField.QUEUE_REFUSALS] = 5
    text = render_metrics(board, [CARD, replace(CARD, name="other")]).decode()
    found = {one.name: one for one in text_string_to_metric_families(text)}
    refused = found["vllm:admission_rejections"].samples
    counts = {s.labels["model_name"]: s.value for s in refused if "reqs" in s.labels["reason"]}
    assert counts == {CARD.name: 0, "other": 5, "": 2}


def test_sglangs_histograms_have_its_buckets(board: Board) -> None:
    found = families(board, "sglang")
    front = {"model_name": "org/tiny", "engine_type": "unified"}
    for name, expected in SGLANG_BUCKETS.items():
        assert bounds(found[name]) == expected, name
        labels = found[name].samples[0].labels
        assert {k: v for k, v in labels.items() if k != "le"} == front
    for name in ("uncached_prompt_tokens_histogram", "generation_tokens_histogram"):
        assert bounds(found[name]) == SGLANG_BUCKETS["prompt_tokens_histogram"]
    assert bounds(found["queue_time_seconds"]).startswith("0.0 0.001 0.005 0.01 0.05 0.1 0.2 0.5")
    assert found["queue_time_seconds"].samples[0].labels.items() >= SGLANG_RANKS.items()


def test_sglangs_gauges_and_counters_tell_of_the_engine(board: Board) -> None:
    slot = board.slot("engine")
    slot[EngineField.PAGES_TOTAL], slot[EngineField.PAGES_FREE], slot[EngineField.PAGE_TOKENS] = (
        8,
        6,
        16,
    )
    slot[EngineField.RUNNING], slot[EngineField.WAITING], slot[EngineField.FINISHED] = 3, 4, 9
    (
        slot[EngineField.PREFILLED_TOKENS],
        slot[EngineField.CACHED_TOKENS],
        slot[EngineField.ABORTED],
    ) = 70, 30, 1
    (
        slot[EngineField.PREFIX_QUERIES],
        slot[EngineField.PREFIX_HITS],
        slot[EngineField.GENERATED_TOKENS],
    ) = 8, 2, 40
    slot[EngineField.DRAFTS], slot[EngineField.RIGHT_DRAFTS], slot[EngineField.DRAFT_ROUNDS] = (
        20,
        5,
        10,
    )
    slot[EngineField.TOKENS_PER_SECOND] = 77
    found = families(board, "sglang")
    gauges = {
        "num_running_reqs": 3,
        "num_queue_reqs": 4,
        "token_usage": 0.25,
        "num_used_tokens": 32,
        "kv_available_tokens": 96,
        "max_total_num_tokens": 128,
        "num_pages": 8,
        "page_size": 16,
        "context_len": 300,
        "cache_hit_rate": 0.25,
        "full_token_usage": 0.25,
        "kv_used_tokens": 32,
        "gen_throughput": 77,
        "spec_accept_length": 1.5,
        "spec_accept_rate": 0.25,
    }
    for name, expected in gauges.items():
        assert found[name].type == "gauge"
        assert value(found[name], **SGLANG_RANKS) == expected, name
    counters = {"prompt_tokens": 100, "generation_tokens": 40, "num_requests": 10}
    for name, expected in counters.items():
        assert found[name].samples[0].name == f"sglang:{name}_total"
        assert value(found[name], engine_type="unified") == expected, name
    assert value(found["cached_tokens"], cache_source="device") == 30
    assert value(found["realtime_tokens"], mode="prefill_compute") == 70
    slot[EngineField.RUNNING] = 0
    assert value(families(board, "sglang")["gen_throughput"]) == 0, "nothing runs"
