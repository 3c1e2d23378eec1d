"""The C++ sampler does what the plain one in numpy does, whatever the rows, and however it runs."""

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import reference_sampler as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_sampler import Rows, candidates, gumbel, make_rows, tell

from headrace.engine_proc.worker.execution.cpu_executor import Isa
from headrace.engine_proc.worker.execution.cpu_sampler import Masks, Sampler
from headrace.engine_proc.worker.execution.executor import Floats, Int32s

Masked = tuple[Floats, Rows, Int32s, Int32s, Floats, Int32s, Masks]

Step = tuple[Floats, Rows, Int32s, Int32s, Floats] | Masked

make_sampler = functools.cache(Sampler)


def run(sampler: Sampler, step: Step, **options: Floats) -> tuple[Int32s, bytes]:
    """Tell a sampler the histories of a step, of which each row has one, and sample."""
    logits, rows, histories, *others = step
    tell(sampler, histories)
    return sampler.sample(logits, rows, *others, **options)


REPORTED = np.dtype([("id", "<i4"), ("logprob", "<f4")])


def assert_same(step: Step, result: tuple[Int32s, bytes]) -> None:
    """Assert that a result is the reference's: the same tokens, logprobs to 1e-5."""
    tokens, logprobs = reference.sample(*step)
    assert result[0].tolist() == tokens.tolist()
    assert len(result[1]) == len(logprobs)
    ours, theirs = [], []
    place = 0
    for num_logprobs in step[1]["num_logprobs"]:
        if num_logprobs >= 0:
            # The first entry of a row has its logprob before its rank.
            for entries, data in ((ours, result[1]), (theirs, logprobs)):
                entries.append(np.frombuffer(data, "<f4", 1, place)[0])
                entries.append(np.frombuffer(data, "<i4", 1, place + 4)[0])
                top = np.frombuffer(data, REPORTED, num_logprobs, place + 8)
                entries += [*top["id"], *top["logprob"]]
            place += 8 * (num_logprobs + 1)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-5)


def make_step(
    rng: np.random.Generator, logits: Floats, fields: list[dict[str, float]], length: int = 30
) -> Step:
    """Make a step with these fields, and with a history and biases for each row."""
    num_rows, vocab_size = logits.shape
    rows = make_rows(num_rows)
    for row, values in zip(rows, fields, strict=True):
        for name, value in values.items():
            row[name] = value
    rows["seed"] = rng.integers(0, 2**64, num_rows, np.uint64)
    rows["position"] = rng.integers(0, 2**20, num_rows)
    rows["num_history"] = rng.integers(0, length, num_rows)
    rows["num_prompt"] = rng.integers(0, length, num_rows)
    rows["num_bias"] = rng.integers(0, 8, num_rows)
    rows["num_history"][::3], rows["num_bias"][::3] = 0, 0
    rows["history_slot"], rows["bias_start"] = np.arange(num_rows), np.arange(num_rows) * 8
    history = rng.integers(0, vocab_size, (num_rows, length)).astype(np.int32)
    bias_tokens = rng.integers(0, vocab_size, num_rows * 8).astype(np.int32)
    bias = rng.normal(0, 5, num_rows * 8).astype(np.float32)
    bias[rng.random(len(bias)) < 0.2] = -np.inf
    return logits, rows, history, bias_tokens, bias


def masked(rng: np.random.Generator, step: Step) -> Step:
    """Return a step in half of whose rows only some tokens may be drawn, the likeliest or not."""
    logits = step[0]
    num_rows, vocab_size = logits.shape
    rows = np.flatnonzero(rng.random(num_rows) < 0.5).astype(np.int32)
    bits = np.zeros((len(rows), -(-vocab_size // 32) * 32), bool)
    bits[:, :vocab_size] = rng.random((len(rows), vocab_size)) < rng.choice([0.01, 0.5, 1])
    bits[np.arange(len(rows)), logits[rows].argmax(axis=1)] |= rng.random(len(rows)) < 0.5
    bits[np.arange(len(rows)), logits[rows].argmin(axis=1)] = True
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    return (*step[:5], rows, masks)


def float32s(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(np.float32(low), np.float32(high), width=32)


row_fields = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0, 1, 1e-3, 1e-9, 1e-30]) | float32s(0.25, 4),
        "top_p": st.sampled_from([0, 0.5, 0.9, 0.99]) | float32s(0, 1),
        "min_p": st.sampled_from([0.05, 1]) | float32s(0, 1),
        "top_k": st.integers(0, 100) | st.just(2**31 - 1),
        "presence_penalty": float32s(-2, 2),
        "frequency_penalty": float32s(-2, 2),
        "repetition_penalty": float32s(0.5, 2),
        "num_logprobs": st.integers(-1, 20),
        "target": st.just(0),
    },
)


@settings(max_examples=300, deadline=None)
@given(
    vocab_size=st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 127, 300, 1000]),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.01, 1, 10]),
    ties=st.booleans(),
    impossible=st.sampled_from([0, 0.1, 0.95]),
    fields=st.lists(row_fields, min_size=1, max_size=4),
)
def test_any_rows(
    vocab_size: int,
    seed: int,
    spread: float,
    ties: bool,
    impossible: float,
    fields: list[dict[str, float]],
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, spread, (len(fields), vocab_size)).astype(np.float32)
    if ties:
        logits = logits.round()
    drop = rng.random(logits.shape) < impossible
    drop[:, rng.integers(vocab_size)] = False  # the reference needs one
    logits[drop] = -np.inf
    step, sampler = make_step(rng, logits, fields), make_sampler(vocab_size)
    for each in (step, masked(rng, step)):
        result = run(sampler, each)
        assert_same(each, result)
        assert_equal(run(sampler, each, maxima=maxima_of(logits)), result)


# One of each path, and of what they may be together.
FIELDS: list[dict[str, float]] = [
    {},
    {"temperature": 0, "num_logprobs": 20},
    {"temperature": 0.6, "num_logprobs": 0},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 5000, "temperature": 2},  # more than there are blocks
    {"top_p": 0.1},
    {"top_p": 0.9, "top_k": 40},
    {"top_p": 0.9, "temperature": 1.5},
    {"top_p": 0.9999, "temperature": 5},  # nearly all
    {"top_p": 0.95, "min_p": 0.01},
    {"min_p": 0.1},
    {"repetition_penalty": 1.2, "num_logprobs": 5, "temperature": 0.8},
    {"presence_penalty": 1, "frequency_penalty": -0.5, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
    {"target": 17, "num_logprobs": 3},
]


def large_step(spread: float, vocab_size: int = 20011, rounds: int = 2) -> Step:
    fields = FIELDS * rounds
    rng = np.random.default_rng(int(spread * 10))
    logits = rng.normal(0, spread, (len(fields), vocab_size + 5)).astype(np.float32)
    return make_step(rng, logits[:, :vocab_size], fields, length=3000)


@pytest.mark.parametrize("spread", [0, 0.3, 3, 8])
def test_a_large_vocabulary_whose_rows_are_padded(spread: float) -> None:
    step = large_step(spread)
    assert_same(step, run(make_sampler(20011), step))


@pytest.mark.parametrize("fields", [{}, {"top_k": 100}, {"top_p": 0.7}])
def test_equals_whose_noise_is_rounded_to_whole_numbers(fields: dict[str, float]) -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 3, (50, 500)).astype(np.float32)
    logits[:, rng.permutation(500)[:90]] = 20
    no_tokens = np.empty(0, np.int32)
    rows = make_rows(50, temperature=2e-15, **fields)
    step = (logits, rows, np.empty((0, 0), np.int32), no_tokens, np.empty(0, np.float32))
    assert_same(step, run(make_sampler(500), step))


def test_logits_of_any_layout() -> None:
    logits, *others = large_step(3)
    result = run(make_sampler(20011), (logits, *others))
    assert run(make_sampler(20011), (np.asfortranarray(logits), *others))[1] == result[1]


def maxima_of(logits: Floats) -> Floats:
    maxima: Floats = np.maximum.reduceat(logits, np.arange(0, logits.shape[1], 64), axis=1)
    return maxima


def assert_equal(one: tuple[Int32s, bytes], other: tuple[Int32s, bytes]) -> None:
    assert one[0].tolist() == other[0].tolist()
    assert one[1] == other[1]  # every bit of the logprobs


def sampler_by(isa: Isa, vocab_size: int) -> Sampler:
    try:
        return Sampler(vocab_size, isa=isa)
    except MemoryError:
        pytest.skip(f"this processor has no {isa}")


@pytest.mark.parametrize("isa", [Isa.PORTABLE, Isa.AVX2, Isa.AVX512])
def test_every_instruction_set_gives_the_same_bits(isa: Isa) -> None:
    sampler = sampler_by(isa, 20011)
    for spread in (0.3, 3):
        step = masked(np.random.default_rng(3), large_step(spread, rounds=1))
        assert_equal(run(sampler, step), run(make_sampler(20011), step))


@pytest.mark.parametrize("isa", [Isa.PORTABLE, Isa.AVX2, Isa.AVX512])
def test_nan_is_as_unlikely_as_minus_infinity(isa: Isa) -> None:
    sampler = sampler_by(isa, 300)
    rng = np.random.default_rng(6)
    logits = rng.normal(0, 3, (200, 300)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.2] = np.nan
    tokens, _ = sampler.sample(logits, make_rows(200, temperature=0))
    assert tokens.tolist() == np.nanargmax(logits, axis=1).tolist()


@pytest.mark.parametrize("fields", [{}, {"num_bias": 1}, {"num_history": 1}])
def test_known_maxima_stand_for_logits_that_nothing_changes(fields: dict[str, float]) -> None:
    logits = np.zeros((3, 300), np.float32)
    logits[:, 70], logits[:, 200] = 2, 3
    known = maxima_of(logits)
    known[:, 200 // 64] = 1  # so that a sampler that reads the maxima shows
    nothing, history = np.zeros(1, np.float32), np.zeros((1, 1), np.int32)
    step = (logits, make_rows(3, temperature=0, **fields), history, history[0], nothing)
    tokens, _ = run(make_sampler(300), step, maxima=known)
    assert tokens.tolist() == 3 * [200 if fields else 70]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    sampler = Sampler(20011, threads=threads)
    step = masked(np.random.default_rng(4), large_step(3))
    for _ in range(3):
        assert_equal(run(sampler, step), run(make_sampler(20011), step))


def test_rows_do_not_depend_on_batch_mates_or_their_order() -> None:
    logits, rows, *others = large_step(3)
    sampler = make_sampler(20011)
    together, logprobs = run(sampler, (logits, rows, *others))
    order = np.random.default_rng(1).permutation(len(rows))
    mixed, _ = run(sampler, (logits[order], rows[order], *others))
    assert mixed.tolist() == together[order].tolist()
    places = [slice(i, i + 1) for i in range(len(rows))]
    alone = [run(sampler, (logits[place], rows[place], *others)) for place in places]
    assert [int(tokens[0]) for tokens, _ in alone] == together.tolist()
    assert b"".join(part for _, part in alone) == logprobs


def test_a_mask_is_of_its_row_alone() -> None:
    step = large_step(3)
    free, _ = run(make_sampler(20011), step)
    logits, rows, *others = masked(np.random.default_rng(5), step)
    tokens, _ = run(make_sampler(20011), (logits, rows, *others))
    masked_rows = others[3]
    assert 0 < len(masked_rows) < len(rows)
    assert np.delete(tokens, masked_rows).tolist() == np.delete(free, masked_rows).tolist()


def test_bans_that_leave_nothing_of_a_mask_do_not_count() -> None:
    logits = np.array([[3, 2, 1, 0]], np.float32)
    rows = make_rows(1, temperature=0, num_bias=2)
    banned, bias = np.array([1, 2], np.int32), np.full(2, -np.inf, np.float32)
    row = np.zeros(1, np.int32)
    for allowed, token in ((0b0110, 1), (0b1110, 3), (0b0100, 2)):
        mask = np.array([[allowed]], np.uint32)
        drawn, _ = make_sampler(4).sample(logits, rows, banned, bias, row, mask)
        assert drawn.tolist() == [token]


def test_what_a_mask_is_too_short_for_is_not_drawn() -> None:
    logits = np.arange(70, dtype=np.float32)[None]
    rows, row = make_rows(1, temperature=0), np.zeros(1, np.int32)
    drawn, _ = make_sampler(70).sample(
        logits, rows, masked_rows=row, masks=np.array([[0b1010]], np.uint32)
    )
    assert drawn.tolist() == [3]


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_broken_model_gets_some_token_of_the_vocabulary(broken: float) -> None:
    logits, rows, *others = large_step(3)
    logits = logits.copy()
    logits[:, 5:9000] = broken
    logits[:3] = broken
    tokens, _ = run(make_sampler(20011), (logits, rows, *others))
    assert (tokens >= 0).all()
    assert (tokens < 20011).all()


# The reference itself


def softmax(scores: reference.Doubles) -> Any:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def random_scores(size: int) -> reference.Doubles:
    return np.random.default_rng(0).normal(0, 3, size)


@pytest.mark.parametrize("top_k", [1, 2, 50, 999])
def test_top_k_keeps_the_k_best(top_k: int) -> None:
    scores = random_scores(1000)
    kept = candidates(scores, top_k=top_k)
    assert set(kept.tolist()) == set(np.argsort(-scores)[:top_k].tolist())


@pytest.mark.parametrize("top_k", [0, 1000, 5000])
def test_top_k_of_zero_or_all_keeps_all(top_k: int) -> None:
    assert candidates(random_scores(1000), top_k=top_k).tolist() == list(range(1000))


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, scale: float) -> None:
    scores = random_scores(5000) * scale
    order = np.argsort(-scores)
    mass = np.cumsum(softmax(scores)[order])
    num_kept = 1 + int((mass < top_p).sum())
    assert set(candidates(scores, top_p=top_p).tolist()) == set(order[:num_kept].tolist())


@pytest.mark.parametrize("min_p", [0.001, 0.3, 1])
def test_min_p_keeps_what_is_likely_enough(min_p: float) -> None:
    scores = random_scores(1000)
    probabilities = softmax(scores)
    kept = np.flatnonzero(probabilities >= min_p * probabilities.max())
    assert candidates(scores, min_p=min_p).tolist() == kept.tolist()


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


def test_gumbel_noise_is_independent_of_other_candidates() -> None:
    seed, position = np.uint64(2**64 - 1), np.uint64(7)
    whole = gumbel(np.arange(100), seed, position)
    assert (gumbel(np.array([90, 7, 8]), seed, position) == whole[[90, 7, 8]]).all()


@pytest.mark.parametrize("bits", [0, 2**64 - 1])
def test_noise_is_finite_whatever_the_random_bits(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        return np.full_like(x, bits)

    monkeypatch.setattr(reference, "mix", mix)
    assert np.isfinite(gumbel(np.arange(2), np.uint64(0), np.uint64(0))).all()
