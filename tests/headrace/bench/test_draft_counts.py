"""The load generator reads how drafts fared from the server's metrics, vLLM's or ours."""

import pytest

from headrace.bench.draft_counts import DraftCounts

PAGE = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{model_name="m"} 10.0
vllm:spec_decode_num_draft_tokens_total{model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_total{model_name="m"} 18.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="1"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="10"} 0.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="2"} 4.0
"""


def test_counts_are_read_by_position() -> None:
    counts = DraftCounts.read(PAGE)
    assert counts == DraftCounts(10, 30, 18, (8, 6, 4, 0))


def test_result_has_the_figures_of_the_run_alone() -> None:
    before = DraftCounts(2, 6, 2, (2, 0, 0, 0))
    result = DraftCounts.read(PAGE).since(before).as_result()
    assert result["spec_decode_acceptance_rate"] == pytest.approx(100 * 16 / 24)
    assert result["spec_decode_acceptance_length"] == pytest.approx(3)
    assert result["spec_decode_per_position_acceptance_rates"] == [75.0, 75.0, 50.0]


def test_server_without_drafts_has_no_figures() -> None:
    none = DraftCounts.read("nothing 1.0")
    assert none.since(DraftCounts()).as_result() == {}
    assert DraftCounts.read(PAGE).since(DraftCounts.read(PAGE)).as_result() == {}
