"""Sampled tokens have the right distribution and depend on nothing but their own row."""

import functools
import re
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from reference_sampler import Doubles, Rows, make_rows, tell

from headrace.engine_proc.worker.execution.cpu_sampler import ROW, Sampler
from headrace.engine_proc.worker.execution.executor import Floats, Int32s
from headrace.ipc.worker_messages import (
    SAMPLING_CODES,
    SAMPLING_ROW,
    SamplingRow,
    sampling_offset,
)

ROOT = Path(__file__).parents[4]
DRAWS = 20000
# Upper 0.1% point of chi-square by degrees of freedom: with fixed seeds this is no lottery.
CHI_SQUARE_LIMIT = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 7: 24.32}

make_sampler = functools.cache(Sampler)  # one serves many tests: nothing may be left behind


def sample(logits: npt.ArrayLike, rows: Rows) -> Int32s:
    """Draw a token per row; one row of logits serves all."""
    table = np.asarray(logits, np.float32)
    table = np.broadcast_to(table, (len(rows), table.shape[-1]))
    return make_sampler(table.shape[1]).sample(table, rows)[0]


def softmax(scores: npt.ArrayLike) -> Doubles:
    weights = np.exp(np.asarray(scores, np.float64) - np.max(scores))
    probabilities: Doubles = weights / weights.sum()
    return probabilities


def assert_follows(drawn: Int32s, probabilities: Doubles) -> None:
    """Assert that the counts of `drawn` are what `probabilities` say, by chi-square."""
    counts = np.bincount(drawn, minlength=len(probabilities))
    assert not counts[probabilities == 0].any(), "an impossible token was drawn"
    possible = probabilities > 0
    expected = len(drawn) * probabilities[possible]
    distance = float(((counts[possible] - expected) ** 2 / expected).sum())
    assert distance < CHI_SQUARE_LIMIT[int(possible.sum()) - 1]


def random_logits(num_rows: int, vocab_size: int) -> Floats:
    return np.random.default_rng(0).normal(0, 3, (num_rows, vocab_size)).astype(np.float32)


def test_a_row_is_laid_out_as_in_the_messages() -> None:
    numbers = tuple(range(len(SamplingRow._fields)))
    row = np.frombuffer(SAMPLING_ROW.pack(*numbers), ROW)[0]
    assert tuple(row) == numbers
    fields = ROW.fields
    assert fields is not None and list(fields) == list(SamplingRow._fields)
    assert [fields[name][1] for name in fields] == [sampling_offset(name) for name in fields]


def test_sampling_row_is_the_struct_of_the_core() -> None:
    header = (ROOT / "csrc/sampling/sampler_row.h").read_text()
    found = re.search(r"struct SamplingRow \{[^\n]*\n(.*?)\n\};", header, re.DOTALL)
    assert found is not None, "sampler_row.h has no struct SamplingRow"
    codes = {"uint64_t": "Q", "int32_t": "i", "float": "f"}
    members = {
        name.strip(): codes[kind]
        for kind, names in re.findall(r"^ *(\w+) ([^;]+);", found[1], re.MULTILINE)
        for name in names.split(",")
    }
    assert list(members.items()) == list(SAMPLING_CODES.items())
    assert f"sizeof(SamplingRow) == {SAMPLING_ROW.size}," in header


def test_greedy_takes_the_largest_logit() -> None:
    logits = random_logits(16, 1000)
    tokens = sample(logits, make_rows(16, temperature=0, top_p=0.5, top_k=3))
    assert tokens.tolist() == logits.argmax(axis=1).tolist()
    assert tokens.dtype == np.int32


@pytest.mark.parametrize("fields", [{}, {"top_k": 100}, {"top_p": 0.7}, {"min_p": 1}])
@pytest.mark.parametrize("temperature", [0, 1e-30])  # noise is lost in the scores' rounding
def test_greedy_takes_the_first_of_equals(temperature: float, fields: dict[str, float]) -> None:
    logits = random_logits(1, 500)[0]
    equals = np.random.default_rng(1).permutation(500)[:90]
    logits[equals] = 20
    rows = make_rows(20, temperature=temperature, **fields)
    assert set(sample(logits, rows).tolist()) == {equals.min()}


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = random_logits(2, 1000)
    rows = make_rows(2)
    rows["temperature"][0] = 0
    alone = sample(logits[1:], rows[1:])
    assert sample(logits, rows).tolist() == [logits[0].argmax(), alone[0]]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_softmax(temperature: float) -> None:
    logits = np.array([2, 1, 0.5, 0, 0, -0.5, -1, -2])
    drawn = sample(logits, make_rows(DRAWS, temperature=temperature))
    assert_follows(drawn, softmax(logits / temperature))


def test_samples_of_a_large_vocabulary_follow_the_softmax() -> None:
    logits = np.full(5000, -3.0)  # most tokens are skipped without taking their noise's logarithm
    logits[[3, 700, 4999]] = 6, 5, 5.5
    drawn = sample(logits, make_rows(DRAWS))
    groups = np.full(5000, 3)
    groups[[3, 700, 4999]] = 0, 1, 2
    assert_follows(groups[drawn], np.bincount(groups, weights=softmax(logits)))


def test_samples_of_successive_seeds_follow_the_softmax() -> None:
    logits = np.array([1, 0, 0.5])
    drawn = sample(logits, make_rows(DRAWS, seed=np.arange(DRAWS), position=12))
    assert_follows(drawn, softmax(logits))


def test_top_k_samples_follow_the_softmax_of_what_is_left() -> None:
    drawn = sample([0, 2, 1, -1, 1.5, -3], make_rows(DRAWS, top_k=3))
    assert_follows(drawn, softmax([-np.inf, 2, 1, -np.inf, 1.5, -np.inf]))


def test_top_p_samples_follow_the_softmax_of_what_is_left() -> None:
    logits = np.log([0.1, 0.4, 0.2, 0.3])
    assert_follows(sample(logits, make_rows(DRAWS, top_p=0.65)), np.array([0, 0.4, 0, 0.3]) / 0.7)
    assert_follows(sample(logits, make_rows(DRAWS, top_p=0.75)), np.array([0, 4, 2, 3]) / 9)


def test_top_p_ends_at_the_token_that_reaches_it_low_ids_first() -> None:
    assert_follows(sample(np.zeros(4), make_rows(DRAWS, top_p=0.5)), np.array([0.5, 0.5, 0, 0]))


def test_top_p_counts_only_what_top_k_left() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert set(sample(logits, make_rows(100, top_p=0.55, top_k=2)).tolist()) == {0}
    assert set(sample(logits, make_rows(100, top_p=0.55)).tolist()) == {0, 1}


def test_top_p_counts_only_what_min_p_left() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert set(sample(logits, make_rows(100, top_p=0.55, min_p=0.7)).tolist()) == {0}


def test_min_p_samples_follow_the_softmax_of_what_is_left() -> None:
    logits = np.log([0.08, 0.4, 0.11, 0.25, 0.16])
    drawn = sample(logits, make_rows(DRAWS, min_p=0.25))
    assert_follows(drawn, np.array([0, 0.4, 0.11, 0.25, 0.16]) / 0.92)


def test_min_p_is_about_the_probabilities_after_temperature() -> None:
    logits = np.log([0.4, 0.1])
    assert set(sample(logits, make_rows(100, min_p=0.3)).tolist()) == {0}
    assert set(sample(logits, make_rows(100, min_p=0.3, temperature=2)).tolist()) == {0, 1}


def draw_after(history: list[int], logits: npt.ArrayLike, **fields: float) -> Int32s:
    rows = make_rows(DRAWS, num_history=len(history), **fields)
    table = np.broadcast_to(np.asarray(logits, np.float32), (DRAWS, len(np.asarray(logits))))
    sampler = make_sampler(table.shape[1])
    tell(sampler, [np.array(history, np.int32)])
    return sampler.sample(table, rows)[0]


def test_presence_penalty_is_taken_once_from_generated_tokens() -> None:
    drawn = draw_after([3, 0, 2, 2, 1], np.zeros(4), num_prompt=1, presence_penalty=1.5)
    assert_follows(drawn, softmax([-1.5, -1.5, -1.5, 0]))


def test_frequency_penalty_scales_with_occurrences() -> None:
    drawn = draw_after([3, 0, 2, 2, 1], np.zeros(4), num_prompt=2, frequency_penalty=0.7)
    assert_follows(drawn, softmax([0, -0.7, -1.4, 0]))


def test_repetition_penalty_divides_positive_multiplies_negative() -> None:
    drawn = draw_after([0, 1, 1, 2], [2, -1, 0, 1, -1], num_prompt=2, repetition_penalty=2)
    assert_follows(drawn, softmax([1, -2, 0, 1, -1]))


def test_penalties_come_after_biases_and_repetition_first() -> None:
    rows = make_rows(DRAWS, num_history=1, num_bias=1, repetition_penalty=2, presence_penalty=0.5)
    logits = np.zeros((DRAWS, 2), np.float32)
    tokens, bias = np.array([1], np.int32), np.array([3], np.float32)
    tell(make_sampler(2), [tokens])
    drawn, _ = make_sampler(2).sample(logits, rows, tokens, bias)
    assert_follows(drawn, softmax([0, 3 / 2 - 0.5]))


def test_biased_samples_follow_the_softmax() -> None:
    logits = np.tile(np.array([0, 1, 2, -1], np.float32), (DRAWS, 1))
    tokens, bias = (
        np.array([1, 2, 2, 0, 0], np.int32),
        np.array([9, -2, 0.5, 1, -np.inf], np.float32),
    )
    rows = make_rows(DRAWS, bias_start=1, num_bias=4)
    drawn, _ = make_sampler(4).sample(logits, rows, bias_tokens=tokens, bias=bias)
    assert_follows(drawn, softmax([-np.inf, 1, 0.5, -1]))
    assert (logits == [0, 1, 2, -1]).all(), "the caller's logits were changed"


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"top_k": 3}, {"temperature": 0}])
def test_the_one_token_that_is_not_banned_is_drawn(fields: dict[str, float]) -> None:
    banned = np.delete(np.arange(100, dtype=np.int32), 77)
    rows = make_rows(50, num_bias=99, num_history=3, repetition_penalty=1.3, **fields)
    bias = np.full(99, -np.inf, np.float32)
    tell(make_sampler(100), [np.array([1, 77, 77], np.int32)])
    drawn, _ = make_sampler(100).sample(random_logits(50, 100), rows, banned, bias)
    assert set(drawn.tolist()) == {77}


def test_even_an_infinite_logit_can_be_banned() -> None:
    logits = random_logits(1, 100)
    logits[0, 63], logits[0, 9] = np.inf, 50
    banned, bias = np.array([63], np.int32), np.array([-np.inf], np.float32)
    for rows in (make_rows(1, num_bias=1), make_rows(1, num_bias=1, temperature=0)):
        drawn, _ = make_sampler(100).sample(logits, rows, bias_tokens=banned, bias=bias)
        assert drawn.tolist() == [9]


def test_where_every_token_is_banned_the_first_is_drawn() -> None:
    rows = make_rows(3, temperature=[0, 1, 1], top_p=[1, 1, 0.5])
    assert sample(np.full(70, -np.inf), rows).tolist() == [0, 0, 0]


def test_tokens_the_vocabulary_does_not_have_are_passed_over() -> None:
    odd = np.array([-1, 70, 2**31 - 1], np.int32)
    rows = make_rows(2, num_history=3, num_bias=3, presence_penalty=1)
    logits = random_logits(2, 70)
    tell(make_sampler(70), [odd])
    drawn, _ = make_sampler(70).sample(logits, rows, odd, np.ones(3, np.float32))
    assert drawn.tolist() == sample(logits, make_rows(2)).tolist()


def test_an_impossible_token_is_never_drawn() -> None:
    logits = np.full(8, -np.inf)
    logits[[3, 5]] = 0
    for rows in (make_rows(500), make_rows(500, top_p=0.99), make_rows(500, top_k=4)):
        assert set(sample(logits, rows).tolist()) == {3, 5}


def test_successive_draws_are_independent() -> None:
    drawn = sample(np.zeros(2), make_rows(DRAWS))
    assert_follows((drawn[1:] != drawn[:-1]).astype(np.int32), np.array([0.5, 0.5]))


def test_a_very_low_temperature_is_nearly_greedy() -> None:
    logits = random_logits(64, 1000)
    tokens = sample(logits, make_rows(64, temperature=1e-6))
    assert tokens.tolist() == logits.argmax(axis=1).tolist()


def test_same_seed_and_position_give_the_same_token() -> None:
    logits = random_logits(32, 1000)
    assert (sample(logits, make_rows(32, seed=5)) == sample(logits, make_rows(32, seed=5))).all()


def test_other_seeds_give_other_tokens() -> None:
    one, other = (sample(np.zeros(1000), make_rows(64, seed=seed)) for seed in (5, 6))
    assert (one == other).sum() < 5


def test_other_positions_give_other_tokens() -> None:
    assert len(set(sample(np.zeros(1000), make_rows(64)).tolist())) > 55


def test_a_target_is_not_sampled_but_reported() -> None:
    logits = np.log(np.array([[0.5, 0.2, 0.3]], np.float32))
    rows = make_rows(1, target=1, num_logprobs=0, temperature=0)
    tokens, logprobs = make_sampler(3).sample(logits, rows)
    assert tokens.tolist() == [1]
    logprob, rank = struct.unpack("<fi", logprobs)
    assert (logprob, rank) == (pytest.approx(np.log(0.2)), 3)


def test_logprobs_are_those_of_the_model() -> None:
    logits = np.log(np.array([[0.2, 0.4, 0.2, 0.2]], np.float32))
    rows = make_rows(1, temperature=0, num_logprobs=3, num_bias=1)
    bias = np.array([9], np.float32)
    tokens, logprobs = make_sampler(4).sample(
        logits, rows, bias_tokens=np.array([2], np.int32), bias=bias
    )
    assert tokens.tolist() == [2]
    logprob, rank, *top = struct.unpack("<fiififif", logprobs)
    assert (logprob, rank) == (pytest.approx(np.log(0.2)), 2)
    assert top[::2] == [1, 0, 2]
    assert top[1::2] == pytest.approx(np.log([0.4, 0.2, 0.2]))


@pytest.mark.parametrize(
    "fields",
    [
        {"target": 70},
        {"num_logprobs": -2},
        {"num_history": 4},
        {"num_history": -1},
        {"history_slot": -1, "num_history": 1},
        {"history_slot": 1, "num_history": 1},
        {"history_slot": 9, "num_history": 1},
        {"bias_start": 2, "num_bias": 1},
        {"num_bias": -1},
    ],
)
def test_a_row_that_points_out_of_range_is_refused(fields: dict[str, float]) -> None:
    tell(make_sampler(70), [np.zeros(3, np.int32), np.zeros(0, np.int32)])
    biases = np.zeros(2, np.int32), np.zeros(2, np.float32)
    with pytest.raises(ValueError, match="range"):
        make_sampler(70).sample(random_logits(2, 70), make_rows(2, **fields), *biases)


def told(*updates: tuple[int, int, list[int]]) -> Sampler:
    """Return a sampler of 5 tokens with these updates: a slot, a place in it, tokens."""
    sampler = Sampler(5, threads=1)
    for slot, start, tokens in updates:
        tell_new(sampler, (slot, start, len(tokens)), tokens)
    return sampler


def tell_new(sampler: Sampler, update: tuple[int, ...], tokens: list[int]) -> None:
    sampler.update_histories(np.array(update, np.int32), np.array(tokens, np.int32))


def commonest(sampler: Sampler, *lengths: int, slot: int = 0) -> list[int]:
    """Return the token that each row has had most often, of rows that see so much of a slot."""
    rows = make_rows(len(lengths), temperature=0, frequency_penalty=-1, history_slot=slot)
    rows["num_history"] = lengths
    tokens, _ = sampler.sample(np.zeros((len(lengths), 5), np.float32), rows)
    return [int(token) for token in tokens]


def test_rows_of_one_slot_see_as_much_as_they_say() -> None:
    sampler = told((0, 0, [4]), (0, 1, [3, 3, 2]), (0, 4, [2, 2]))
    assert commonest(sampler, 0, 1, 3, 6) == [0, 4, 3, 2]


def test_what_is_told_anew_takes_the_place_of_all_behind() -> None:
    sampler = told((0, 0, [1, 2, 2, 2]), (0, 1, [3, 3]))
    assert commonest(sampler, 3) == [3]
    with pytest.raises(ValueError, match="range"):
        commonest(sampler, 4)


def test_slots_do_not_see_each_other() -> None:
    sampler = told()
    tell_new(sampler, (2, 0, 2, 0, 0, 2, 2, 2, 1), [1, 1, 4, 4, 1])
    assert (commonest(sampler, 2), commonest(sampler, 3, slot=2)) == ([4], [1])
    with pytest.raises(ValueError, match="range"):
        commonest(sampler, 1, slot=1)


@pytest.mark.parametrize(
    ("update", "tokens"),
    [
        ((0, 4, 1), [1]),  # a gap
        ((0, -1, 1), [1]),
        ((-1, 0, 1), [1]),
        ((1 << 20, 0, 1), [1]),
        ((0, 0, 2), [1]),
        ((0, 0, -1), []),
        ((0, 0, 1), [1, 2]),
        ((0, 0), [1]),
        ((0, 0, 1, 0, 1, 1), [1]),
    ],
)
def test_an_odd_update_of_a_history_is_refused(update: tuple[int, ...], tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="histor"):
        tell_new(told((0, 0, [1, 2, 3])), update, tokens)


def test_no_rows_are_no_tokens() -> None:
    tokens, logprobs = make_sampler(70).sample(random_logits(0, 70), make_rows(0))
    assert (tokens.shape, tokens.dtype, logprobs) == ((0,), np.int32, b"")
