"""The cache's memory becomes pages and state slots."""

import pytest

from headrace.engine_proc.worker.execution.cache_split import split_cache
from headrace.errors import ConfigError


def test_models_without_states_have_pages_only() -> None:
    assert split_cache(1000, page_bytes=30, state_bytes=0, max_num_seqs=4) == (33, 0)


@pytest.mark.parametrize(
    ("max_num_seqs", "num_states"),
    [(4, 12), (10, 20), (100, 50)],  # an eighth, what is needed, a half
)
def test_states_and_pages_share_the_memory(max_num_seqs: int, num_states: int) -> None:
    split = split_cache(1000, page_bytes=30, state_bytes=10, max_num_seqs=max_num_seqs)
    assert split == ((1000 - 10 * num_states) // 30, num_states)


def test_memory_for_no_sequence_s_states_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes 1000 .*; raise it to 1200 or"):
        split_cache(1000, page_bytes=30, state_bytes=300, max_num_seqs=4)
    assert split_cache(1200, page_bytes=30, state_bytes=300, max_num_seqs=4).num_states == 2
