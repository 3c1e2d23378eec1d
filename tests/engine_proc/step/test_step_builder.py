"""A step's arrays say what its chunks say, and fit their channel."""

from array import array
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_configs import execution_config
from sampling_rows import sampling_rows

from headrace.engine_proc.child_processes.worker_group import MIN_PAGE_TOKENS, step_bytes
from headrace.engine_proc.sequence.chunk import Chunk
from headrace.engine_proc.sequence.image_placeholder import ImagePlaceholder
from headrace.engine_proc.sequence.mrope import MRopePositions
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.engine_proc.shm.grammar_bitmask import GrammarBitmask
from headrace.engine_proc.step.draft_step import build_draft_step
from headrace.engine_proc.step.step_builder import build_step, fill_masks
from headrace.engine_proc.worker.execution.runner import page_table_of
from headrace.ipc.messages import (
    MAX_BIASES,
    MAX_LOGPROBS,
    GenerateRequest,
    Image,
    Sampling,
    request_id,
)
from headrace.ipc.worker_messages import SamplingRow, Step


def make_sequence(tokens: list[int], pages: list[int], seed: int = 0, **options: Any) -> Sequence:
    request = GenerateRequest(
        id=request_id(0, 1),
        detokenizer=0,
        max_tokens=1,
        sampling=Sampling(seed=seed, **options),
        stop_token_ids=[],
        plan=b"",
    )
    sequence = Sequence.of(request, array("I", tokens).tobytes())
    sequence.pages = array("i", pages)
    return sequence


def decode(sequence: Sequence) -> Chunk:
    """Compute the newest token the fast way."""
    start = len(sequence.tokens) - 1
    return Chunk(sequence, start, 1, array("i"), is_last=True, is_decode=True)


def test_chunks_are_flattened_in_order() -> None:
    decode = make_sequence([5, 6, 7, 8], [3, 1])
    prompt = make_sequence([10, 11, 12, 13, 14], [2])
    step = build_step([Chunk.of(decode, 3, 1), Chunk.of(prompt, 0, 3)])
    assert np.frombuffer(step.token_ids, np.int32).tolist() == [8, 10, 11, 12]
    assert np.frombuffer(step.positions, np.int32).tolist() == [3, 0, 1, 2]
    assert np.frombuffer(step.sequences, np.int32).tolist() == [0, 1, 1, 1]


def test_pages_are_sent_without_padding() -> None:
    chunks = [Chunk.of(make_sequence([1], pages), 0, 1) for pages in ([7], [4, 5, 6], [1, 2])]
    for step in (build_step(chunks), build_draft_step(chunks)):
        assert np.frombuffer(step.page_table, np.int32).tolist() == [7, 4, 5, 6, 1, 2]
        assert np.frombuffer(step.page_counts, np.int32).tolist() == [1, 3, 2]
        assert page_table_of(step).tolist() == [[7, 0, 0], [4, 5, 6], [1, 2, 0]]


@pytest.mark.parametrize("counts", [[2, 3, 2], [1, 0], [2, -1, 0], [1 << 30, 1 << 30, 1 << 30]])
def test_page_counts_that_do_not_fit_are_refused(counts: list[int]) -> None:
    sequences, pages = (np.array(numbers, np.int32).tobytes() for numbers in ([0, 1, 2], [7]))
    step = Step(
        token_ids=b"",
        positions=b"",
        sequences=sequences,
        page_table=pages,
        logit_rows=b"",
        rows=b"",
        page_counts=np.array(counts, np.int32).tobytes(),
    )
    with pytest.raises(ValueError, match="for 3 sequences with 1 pages"):
        page_table_of(step)


def test_sequences_with_as_many_pages_need_no_counts() -> None:
    step = build_step([Chunk.of(make_sequence([1], pages), 0, 1) for pages in ([7, 3], [4, 5])])
    assert step.page_counts == b""
    assert page_table_of(step).tolist() == [[7, 3], [4, 5]]


def test_the_fast_way_for_decodes_is_the_general_way() -> None:
    sequences = [make_sequence([1, 2, 3, seed], [0, 1], seed, temperature=0.5) for seed in (7, 8)]
    general = build_step([Chunk.of(sequence, 3, 1) for sequence in sequences])
    for _ in range(2):  # rows are kept from step to step
        fast = build_step([decode(sequence) for sequence in sequences])
        assert fast == general
    sequences[0].tokens.append(9)
    (moved,) = sampling_rows(build_step([decode(sequences[0])]).rows)
    assert (moved.seed, moved.position) == (7, 5)


def test_only_chunks_that_reach_the_end_have_a_logit_row() -> None:
    whole = make_sequence([1, 2, 3], [0])
    part = make_sequence([4, 5, 6], [1])
    step = build_step([Chunk.of(part, 0, 2), Chunk.of(whole, 0, 3), Chunk.of(part, 0, 1)])
    assert np.frombuffer(step.logit_rows, np.int32).tolist() == [4]
    assert len(sampling_rows(step.rows)) == 1


def test_a_token_that_is_being_sampled_is_reported_by_its_row() -> None:
    plain, other = make_sequence([1, 2, 3], [0]), make_sequence([4, 5], [1], logprobs=0)
    known = make_sequence([9], [2])
    assert build_step([Chunk.of(other, 0, 2), Chunk.of(plain, 0, 3)]).token_sources == b""
    for sequence in (plain, other):
        sequence.num_expected += 1
    ahead = Chunk(plain, 3, 1, array("i"), is_last=True, is_decode=True)
    step = build_step([ahead, Chunk.of(known, 0, 1), Chunk.of(other, 2, 1)])
    assert (column(step.token_ids), column(step.token_sources)) == ([0, 9, 0], [1, -1, 0])
    assert [row.position for row in sampling_rows(step.rows)] == [4, 1, 3]


def rows_of(*chunks: Chunk) -> list[SamplingRow]:
    return sampling_rows(build_step(list(chunks)).rows)


def test_rows_follow_the_requests() -> None:
    options: dict[str, Any] = {"temperature": 0.5, "top_p": 0.25, "top_k": 40, "min_p": 0.125}
    first = make_sequence([1, 2], [0], seed=2**64 - 1, logprobs=3, **options)
    second = make_sequence([1, 2, 3], [1], seed=9)
    assert rows_of(Chunk.of(first, 0, 2), Chunk.of(second, 2, 1)) == [
        SamplingRow(seed=2**64 - 1, position=2, num_logprobs=3, **options),
        SamplingRow(seed=9, position=3),
    ]


def test_noise_does_not_depend_on_how_the_prompt_was_cut() -> None:
    sequence = make_sequence([1, 2, 3], [0], seed=5)
    assert rows_of(Chunk.of(sequence, 0, 3)) == rows_of(Chunk.of(sequence, 2, 1))


def test_guesses_are_computed_and_drawn_after() -> None:
    sequence = make_sequence([1, 2, 3], [0], repetition_penalty=1.5)
    step = build_step([Chunk.of(sequence, 2, 1, array("i", [8, 9]))])
    assert np.frombuffer(step.token_ids, np.int32).tolist() == [3, 8, 9]
    assert np.frombuffer(step.positions, np.int32).tolist() == [2, 3, 4]
    assert np.frombuffer(step.logit_rows, np.int32).tolist() == [0, 1, 2]
    assert np.frombuffer(step.history, np.int32).tolist() == [1, 2, 3, 8, 9]
    assert np.frombuffer(step.history_updates, np.int32).tolist() == [0, 0, 5]
    assert [
        (row.position, row.history_slot, row.num_prompt, row.num_history)
        for row in sampling_rows(step.rows)
    ] == [(3, 0, 3, 3), (4, 0, 3, 4), (5, 0, 3, 5)]


def test_watched_prompt_tokens_have_rows_of_their_own() -> None:
    sequence = make_sequence([5, 6, 7], [0], prompt_logprobs=2)
    step = build_step([Chunk.of(sequence, 0, 3)])
    assert np.frombuffer(step.logit_rows, np.int32).tolist() == [0, 1, 2]
    rows = sampling_rows(step.rows)
    assert [(row.num_logprobs, row.target) for row in rows] == [(2, 6), (2, 7), (-1, -1)]


def test_embedding_sequence_pools_its_last_token_draws_none() -> None:
    request = msgspec.structs.replace(make_sequence([1, 2, 3], [0]).request, embeds=True)
    sequence = Sequence.of(request, array("I", [1, 2, 3]).tobytes())
    step = build_step([Chunk.of(sequence, 0, 3)])
    assert np.frombuffer(step.pooled_rows, np.int32).tolist() == [2]
    assert step.logit_rows == step.rows == b""
    assert build_step([Chunk.of(sequence, 0, 2)]).pooled_rows == b""


class Played:
    """A matcher that writes 1 for the first mask, 2 for the next, and so on."""

    is_stuck = False

    def fill(self, generated: Any, drafts: Any, area: GrammarBitmask, first: int) -> None:
        for place in range(len(drafts) + 1):
            start = (first + place) * area.mask_bytes
            area.buffer[start : start + 4] = (place + 1).to_bytes(4, "little")


def constrained(tokens: list[int], matcher: Any) -> Sequence:
    request = msgspec.structs.replace(make_sequence([], []).request, grammar=b"g")
    sequence = Sequence.of(request, array("I", tokens).tobytes())
    sequence.pages, sequence.matcher = array("i", [0]), matcher
    return sequence


def test_grammar_rows_have_masks_in_row_order() -> None:
    drafted = Chunk.of(constrained([1, 2], Played()), 1, 1, array("i", [3, 4]))
    free = Chunk.of(make_sequence([5, 6], [1]), 0, 2)
    unfinished = Chunk.of(constrained([1, 2, 3], Played()), 0, 2)
    lost = Chunk.of(constrained([7], None), 0, 1)
    chunks = [free, drafted, unfinished, lost]
    step = build_step(chunks)
    assert np.frombuffer(step.logit_rows, np.int32).tolist() == [1, 2, 3, 4, 7]
    assert np.frombuffer(step.masked_rows, np.int32).tolist() == [1, 2, 3, 4]
    area = GrammarBitmask.create(4, 32)
    fill_masks(chunks, area)
    assert np.frombuffer(area.buffer, np.uint32).tolist() == [1, 2, 3, 2**32 - 1]


def test_scored_prompt_has_watched_rows_alone() -> None:
    watched = make_sequence([5, 6, 7], [0], prompt_logprobs=2).request
    request = msgspec.structs.replace(watched, max_tokens=0, grammar=b"g", allowed=b"\1")
    sequence = Sequence.of(request, array("I", [5, 6, 7]).tobytes())
    chunk = Chunk.of(sequence, 0, 3)
    step = build_step([chunk])
    assert np.frombuffer(step.logit_rows, np.int32).tolist() == [0, 1]
    assert step.masked_rows == b""
    area = GrammarBitmask.create(1, 32)
    fill_masks([chunk], area)
    assert bytes(area.buffer) == bytes(4)


def allowing(sequence: Sequence, allowed: int) -> Sequence:
    mask = allowed.to_bytes(4, "little")
    request = msgspec.structs.replace(sequence.request, allowed=mask)
    found = Sequence.of(request, sequence.tokens.tobytes())
    found.pages, found.matcher = sequence.pages, sequence.matcher
    return found


def test_masks_have_what_a_grammar_and_a_request_both_allow() -> None:
    free = allowing(make_sequence([5, 6], [1]), 0b1100)
    both = allowing(constrained([1, 2], Played()), 0b110)  # the grammar allows 0, and then 1
    chunks = [Chunk.of(free, 1, 1), Chunk.of(both, 1, 1, array("i", [1]))]
    assert np.frombuffer(build_step(chunks).masked_rows, np.int32).tolist() == [0, 1, 2]
    area = GrammarBitmask.create(3, 32)
    fill_masks(chunks, area)
    assert np.frombuffer(area.buffer, np.uint32).tolist() == [0b1100, 2**32 - 1, 0b10]
    assert (free.is_stuck, both.is_stuck) == (False, True)


def test_the_largest_step_fits_its_channel() -> None:
    config = execution_config(max_model_len=100, max_num_seqs=8, max_num_batched_tokens=200)
    pages = list(range(-(-config.max_model_len // MIN_PAGE_TOKENS)))
    counts = [93] + [1] * 6 + [100]
    options: dict[str, Any] = {
        "repetition_penalty": 2.0,
        "logit_bias": dict.fromkeys(range(MAX_BIASES), 1.0),
        "prompt_logprobs": MAX_LOGPROBS,
    }
    chunks = [Chunk.of(make_sequence([1] * 100, pages, **options), 100 - n, n) for n in counts]
    assert sum(counts) == 199
    assert len(msgspec.msgpack.encode(build_step(chunks))) <= step_bytes(config)


def test_the_second_of_two_texts_is_marked() -> None:
    pair, text = make_sequence([1, 5, 2, 6, 2], [0]), make_sequence([1, 2], [1])
    for sequence, second in ((pair, 3), (text, 0)):
        sequence.request = msgspec.structs.replace(
            sequence.request, embeds=True, second_text=second
        )
    chunks = [Chunk.of(pair, 0, 5), Chunk.of(text, 0, 2)]
    assert np.frombuffer(build_step(chunks).token_types, np.int32).tolist() == [0, 0, 0, 1, 1, 0, 0]
    assert build_step(chunks[1:]).token_types == b""


def with_image(
    sequence: Sequence, start: int, num_rows: int, grid: list[int] | None = None
) -> Sequence:
    """Put an image into a sequence, whose rows are 100 and following."""
    image = Image(b"", start, num_rows, num_rows, {}, grid or [])
    placed = ImagePlaceholder(image, image.key, array("i", range(start, start + num_rows)))
    placed.rows = array("i", range(100, 100 + num_rows))
    sequence.images = [placed]
    if grid:
        sequence.rope = MRopePositions([(start, grid)])
    return sequence


def column(data: bytes) -> list[int]:
    return np.frombuffer(data, np.int32).tolist()


def test_a_step_without_images_has_no_columns_of_them() -> None:
    decode = with_image(make_sequence([1, 2, 3, 4], [0]), 1, 2)
    step = build_step([Chunk.of(decode, 3, 1), Chunk.of(make_sequence([1, 2], [1]), 0, 2)])
    assert step.embed_rows == step.rope_positions == step.last_seen == b""


def test_tokens_of_an_image_come_in_as_its_rows() -> None:
    image = with_image(make_sequence([1, 2, 2, 2, 3], [0]), 1, 3)
    text = make_sequence([5, 6], [1])
    step = build_step([Chunk.of(text, 0, 2), Chunk.of(image, 0, 3)])
    assert column(step.embed_rows) == [-1, -1, -1, 100, 101]
    assert column(build_step([Chunk.of(image, 2, 3)]).embed_rows) == [101, 102, -1]
    assert step.rope_positions == step.last_seen == b""


def test_of_positions_in_three_parts_texts_have_the_same_thrice() -> None:
    image = with_image(make_sequence([1, 2, 2, 2, 2, 3], [0]), 1, 4, [1, 2, 2])
    text = make_sequence([5, 6], [1])
    step = build_step([Chunk.of(text, 0, 2), Chunk.of(image, 3, 3)])
    positions = np.frombuffer(step.rope_positions, np.int32).reshape(-1, 3).tolist()
    assert positions == [[0, 0, 0], [1, 1, 1], [1, 2, 1], [1, 2, 2], [3, 3, 3]]
    image.tokens.append(7)
    assert column(build_step([decode(image)]).rope_positions) == [4, 4, 4]


def test_adjacent_tokens_of_a_whole_image_see_the_last_of_them() -> None:
    image = with_image(make_sequence([1, 2, 2, 3, 2, 4], [0]), 1, 2)
    image.images[0].places = array("i", [1, 2, 4])
    image.images[0].rows = array("i", [7, 8, 9])
    image.images[0].is_whole = True
    step = build_step([Chunk.of(make_sequence([5], [1]), 0, 1), Chunk.of(image, 0, 6)])
    assert column(step.last_seen) == [0, 0, 2, 2, 3, 4, 5]
    assert column(build_step([Chunk.of(image, 2, 4)]).last_seen) == [2, 3, 4, 5]
