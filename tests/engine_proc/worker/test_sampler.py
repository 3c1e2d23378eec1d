"""Sampled tokens have the right distribution and depend on nothing but their own row."""

import numpy as np
import numpy.typing as npt
import pytest

from headrace.engine_proc.worker.executor import Floats, Int32s
from headrace.engine_proc.worker.sampler import (
    LIKELY,
    ROW,
    candidates,
    gumbel,
    sample,
)

Rows = npt.NDArray[np.void]
DRAWS = 20000
# Upper 0.1% point of chi-square by degrees of freedom: with fixed seeds this is no lottery.
CHI_SQUARE_LIMIT = {1: 10.83, 2: 13.82, 4: 18.47, 7: 24.32}


def make_rows(
    num_rows: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 1,
) -> Rows:
    """Return rows of one sequence at successive positions."""
    rows = np.zeros(num_rows, ROW)
    rows["seed"], rows["position"] = seed, np.arange(num_rows)
    rows["temperature"], rows["top_p"], rows["top_k"] = temperature, top_p, top_k
    rows["repetition_penalty"], rows["num_logprobs"], rows["target"] = 1, -1, -1
    return rows


def softmax(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    weights = np.exp(scores - scores.max())
    probabilities: npt.NDArray[np.float64] = weights / weights.sum()
    return probabilities


def chi_square(drawn: Int32s, probabilities: npt.NDArray[np.float64]) -> float:
    """Return how far the counts of `drawn` are from what `probabilities` say."""
    counts = np.bincount(drawn, minlength=len(probabilities))
    assert not counts[probabilities == 0].any(), "an impossible token was drawn"
    possible = probabilities > 0
    expected = len(drawn) * probabilities[possible]
    return float(((counts[possible] - expected) ** 2 / expected).sum())


def random_logits(num_rows: int, vocab_size: int) -> Floats:
    return np.random.default_rng(0).normal(0, 3, (num_rows, vocab_size)).astype(np.float32)


def test_greedy_takes_the_largest_logit() -> None:
    logits = random_logits(16, 1000)
    tokens = sample(logits, make_rows(16, temperature=0, top_p=0.5, top_k=3))
    assert tokens.tolist() == logits.argmax(axis=1).tolist()
    assert tokens.dtype == np.int32


def test_greedy_takes_the_first_of_equals() -> None:
    assert sample(np.array([[1, 5, 5]], np.float32), make_rows(1, temperature=0)).tolist() == [1]


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = random_logits(2, 1000)
    rows = make_rows(2)
    rows["temperature"][0] = 0
    alone = sample(logits[1:], rows[np.array([1])])
    assert sample(logits, rows).tolist() == [logits[0].argmax(), alone[0]]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_softmax(temperature: float) -> None:
    logits = np.array([2, 1, 0.5, 0, 0, -0.5, -1, -2], np.float32)
    drawn = sample(np.tile(logits, (DRAWS, 1)), make_rows(DRAWS, temperature))
    probabilities = softmax(logits.astype(np.float64) / temperature)
    assert chi_square(drawn, probabilities) < CHI_SQUARE_LIMIT[7]


def test_samples_of_successive_seeds_follow_the_softmax() -> None:
    logits = np.array([1, 0, 0.5], np.float32)
    rows = make_rows(DRAWS)
    rows["seed"], rows["position"] = np.arange(DRAWS), 12
    drawn = sample(np.tile(logits, (DRAWS, 1)), rows)
    assert chi_square(drawn, softmax(logits.astype(np.float64))) < CHI_SQUARE_LIMIT[2]


def test_top_k_samples_follow_the_softmax_of_what_is_left() -> None:
    logits = np.array([0, 2, 1, -1, 1.5, -3], np.float32)
    drawn = sample(np.tile(logits, (DRAWS, 1)), make_rows(DRAWS, top_k=3))
    left = np.where(logits >= 1, logits, -np.inf).astype(np.float64)
    assert chi_square(drawn, softmax(left)) < CHI_SQUARE_LIMIT[2]


def test_successive_draws_are_independent() -> None:
    logits = np.zeros((DRAWS, 2), np.float32)
    drawn = sample(logits, make_rows(DRAWS))
    changes = (drawn[1:] != drawn[:-1]).astype(np.int32)
    assert chi_square(changes, np.array([0.5, 0.5])) < CHI_SQUARE_LIMIT[1]


def test_a_very_low_temperature_is_nearly_greedy() -> None:
    logits = random_logits(64, 1000)
    tokens = sample(logits, make_rows(64, temperature=1e-6))
    assert tokens.tolist() == logits.argmax(axis=1).tolist()


def test_same_seed_and_position_give_the_same_token() -> None:
    logits = random_logits(32, 1000)
    assert (sample(logits, make_rows(32, seed=5)) == sample(logits, make_rows(32, seed=5))).all()


def test_other_seeds_give_other_tokens() -> None:
    logits = np.zeros((64, 1000), np.float32)
    one, other = (sample(logits, make_rows(64, seed=seed)) for seed in (5, 6))
    assert (one == other).sum() < 5


def test_other_positions_give_other_tokens() -> None:
    drawn = sample(np.zeros((64, 1000), np.float32), make_rows(64))
    assert len(set(drawn.tolist())) > 55


def test_tokens_do_not_depend_on_batch_mates_or_row_order() -> None:
    logits = random_logits(24, 3000)
    rows = make_rows(24, temperature=1.3)
    rows["top_k"][::3], rows["top_p"][::2], rows["temperature"][::5] = 20, 0.8, 0
    together = sample(logits, rows)
    order = np.random.default_rng(1).permutation(24)
    assert sample(logits[order], rows[order]).tolist() == together[order].tolist()
    for row in range(24):
        alone = sample(logits[row : row + 1], rows[np.array([row])])
        assert alone.tolist() == [together[row]]


@pytest.mark.parametrize("top_k", [1, 2, 50, 999])
def test_top_k_keeps_the_k_best(top_k: int) -> None:
    scores = random_logits(1, 1000)[0].astype(np.float64)
    kept = candidates(scores, top_k, 1.0)
    assert set(kept.tolist()) == set(np.argsort(-scores)[:top_k].tolist())


@pytest.mark.parametrize("top_k", [0, 1000, 5000])
def test_top_k_of_zero_or_all_keeps_all(top_k: int) -> None:
    scores = random_logits(1, 1000)[0].astype(np.float64)
    assert sorted(candidates(scores, top_k, 1.0).tolist()) == list(range(1000))


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])  # flat: more than LIKELY are needed
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, scale: float) -> None:
    scores = random_logits(1, 5000)[0].astype(np.float64) * scale
    order = np.argsort(-scores)
    mass = np.cumsum(softmax(scores)[order])
    num_kept = 1 + int((mass < top_p).sum())
    assert set(candidates(scores, 0, top_p).tolist()) == set(order[:num_kept].tolist())


def test_a_flat_distribution_needs_more_than_the_likely_ones() -> None:
    assert len(candidates(np.zeros(4 * LIKELY), 0, 0.5)) == 2 * LIKELY


def test_top_p_counts_only_what_top_k_left() -> None:
    scores = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    assert set(candidates(scores, 2, 0.55).tolist()) == {0}
    assert set(candidates(scores, 0, 0.55).tolist()) == {0, 1}


def test_an_impossible_token_is_never_drawn() -> None:
    logits = np.full((500, 8), -np.inf, np.float32)
    logits[:, 3], logits[:, 5] = 0, 0
    for rows in (make_rows(500), make_rows(500, top_p=0.99), make_rows(500, top_k=4)):
        assert set(sample(logits, rows).tolist()) == {3, 5}


def test_noise_is_gumbels() -> None:
    noise = gumbel(np.arange(100000), np.uint64(3), np.uint64(4))
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - 0.57722) < 0.02
    assert abs(noise.var() - np.pi**2 / 6) < 0.05


def test_noise_of_the_next_seed_is_not_that_of_the_next_position() -> None:
    # The sequences of one request have successive seeds.
    tokens = np.arange(100)
    one = gumbel(tokens, np.uint64(8), np.uint64(4))
    assert not np.isin(gumbel(tokens, np.uint64(7), np.uint64(5)), one).any()


def test_noise_of_a_token_does_not_depend_on_the_other_candidates() -> None:
    seed, position = np.uint64(2**64 - 1), np.uint64(7)
    whole = gumbel(np.arange(100), seed, position)
    assert (gumbel(np.array([90, 7, 8]), seed, position) == whole[[90, 7, 8]]).all()


@pytest.mark.parametrize("bits", [0, 2**64 - 1])
def test_noise_is_finite_whatever_the_random_bits(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        return np.full_like(x, bits)

    monkeypatch.setattr("headrace.engine_proc.worker.sampler.mix", mix)
    assert np.isfinite(gumbel(np.arange(2), np.uint64(0), np.uint64(0))).all()
