"""A step's arrays say what its chunks say, and fit their channel."""

from array import array

import msgspec
import numpy as np

from headrace.config import EngineConfig
from headrace.engine_proc.batch import build_step
from headrace.engine_proc.scheduler import Chunk
from headrace.engine_proc.sequence import Sequence
from headrace.engine_proc.workers import MIN_PAGE_TOKENS, step_bytes
from headrace.messages import GenerateRequest, request_id


def make_sequence(tokens: list[int], pages: list[int], seed: int = 0, **options: float) -> Sequence:
    request = GenerateRequest(
        id=request_id(0, 1),
        detokenizer=0,
        max_tokens=1,
        temperature=options.get("temperature", 0.0),
        top_p=options.get("top_p", 1.0),
        top_k=int(options.get("top_k", 0)),
        seed=seed,
        stop_token_ids=[],
        plan=b"",
    )
    sequence = Sequence.of(request, array("I", tokens).tobytes())
    sequence.pages = pages
    return sequence


def test_chunks_are_flattened_in_order() -> None:
    decode = make_sequence([5, 6, 7, 8], [3, 1])
    prompt = make_sequence([10, 11, 12, 13, 14], [2])
    step = build_step([Chunk(decode, 3, 1), Chunk(prompt, 0, 3)])
    assert np.frombuffer(step.token_ids, np.int32).tolist() == [8, 10, 11, 12]
    assert np.frombuffer(step.positions, np.int32).tolist() == [3, 0, 1, 2]
    assert np.frombuffer(step.sequences, np.int32).tolist() == [0, 1, 1, 1]


def test_page_table_has_a_row_per_chunk_padded_to_the_longest() -> None:
    chunks = [Chunk(make_sequence([1], pages), 0, 1) for pages in ([7], [4, 5, 6], [1, 2])]
    table = np.frombuffer(build_step(chunks).page_table, np.int32).reshape(3, 3)
    assert table.tolist() == [[7, 0, 0], [4, 5, 6], [1, 2, 0]]


def test_only_chunks_that_reach_the_end_have_a_logit_row() -> None:
    whole = make_sequence([1, 2, 3], [0])
    part = make_sequence([4, 5, 6], [1])
    step = build_step([Chunk(part, 0, 2), Chunk(whole, 0, 3), Chunk(part, 0, 1)])
    assert np.frombuffer(step.logit_rows, np.int32).tolist() == [4]
    assert len(step.temperature) == len(step.top_p) == len(step.top_k) == 4


def test_sampling_columns_follow_the_requests() -> None:
    first = make_sequence([1, 2], [0], seed=2**64 - 1, temperature=0.5, top_p=0.25, top_k=40)
    second = make_sequence([1, 2, 3], [1], seed=9)
    step = build_step([Chunk(first, 0, 2), Chunk(second, 2, 1)])
    assert np.frombuffer(step.temperature, np.float32).tolist() == [0.5, 0]
    assert np.frombuffer(step.top_p, np.float32).tolist() == [0.25, 1]
    assert np.frombuffer(step.top_k, np.int32).tolist() == [40, 0]


def test_noise_is_named_by_seed_and_position_of_the_new_token() -> None:
    sequence = make_sequence([1, 2, 3], [0], seed=2**64 - 1)
    noise = np.frombuffer(build_step([Chunk(sequence, 2, 1)]).noise, np.uint64)
    assert noise.tolist() == [2**64 - 1, 3]


def test_noise_does_not_depend_on_how_the_prompt_was_cut() -> None:
    sequence = make_sequence([1, 2, 3], [0], seed=5)
    at_once, in_chunks = (build_step([Chunk(sequence, s, 3 - s)]) for s in (0, 2))
    assert at_once.noise == in_chunks.noise


def test_the_largest_step_fits_its_channel() -> None:
    config = EngineConfig(
        run_dir="",
        model_path="",
        max_model_len=100,
        num_detokenizers=1,
        max_num_seqs=8,
        max_num_batched_tokens=200,
        dtype="auto",
        kv_cache_memory_bytes=0,
    )
    pages = list(range(-(-config.max_model_len // MIN_PAGE_TOKENS)))
    counts = [93] + [1] * 6 + [100]
    chunks = [Chunk(make_sequence([1] * 100, pages), 100 - n, n) for n in counts]
    assert sum(counts) == 199
    assert len(msgspec.msgpack.encode(build_step(chunks))) <= step_bytes(config)
