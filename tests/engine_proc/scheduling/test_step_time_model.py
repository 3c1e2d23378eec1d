"""The learned cost of a step is the true one, whatever sizes the steps had."""

import math
import random

import pytest

from headrace.engine_proc.scheduling.step_time_model import (
    MIN_CHUNK,
    PATIENCE,
    PATIENCE_S,
    StepTimeModel,
)

BASE, SLOPE = 0.004, 0.0007


def taught(sizes: list[int], base: float = BASE, slope: float = SLOPE) -> StepTimeModel:
    step_time = StepTimeModel()
    for size in sizes:
        step_time.observe(size, base + slope * size)
    return step_time


def test_nothing_learned_is_no_limit() -> None:
    assert StepTimeModel().tokens_within(0.1, 512) == 512


@pytest.mark.parametrize("sizes", [[1, 512], [1, 1, 1, 1, 300], [8, 16, 32, 64, 128] * 4])
def test_the_line_is_found(sizes: list[int]) -> None:
    assert taught(sizes).tokens_within(0.1, 512) == pytest.approx((0.1 - BASE) / SLOPE, abs=1)


def test_steps_of_one_size_are_taken_to_cost_the_same_per_token() -> None:
    assert taught([4] * 10).tokens_within(0.1, 512) == int(0.1 / (BASE / 4 + SLOPE))


def test_prompts_always_go_on() -> None:
    assert taught([1, 512]).tokens_within(0.001, 512) == MIN_CHUNK


def test_no_more_than_the_limit() -> None:
    assert taught([1, 512]).tokens_within(10, 512) == 512


def test_noise_that_makes_larger_steps_look_faster_is_no_limit() -> None:
    assert taught([1, 512], slope=-1e-6).tokens_within(0.1, 512) == 512


def test_a_slope_next_to_nothing_is_no_limit() -> None:
    assert taught([1, 512], base=0, slope=1e-320).tokens_within(0.1, 512) == 512


def test_step_may_take_many_times_the_time_of_its_size() -> None:
    assert StepTimeModel().patience_s(1) is None
    patience_s = PATIENCE_S + PATIENCE * (BASE + SLOPE * 300)
    assert taught([1, 512]).patience_s(300) == pytest.approx(patience_s)
    falling = taught([1, 512], slope=-1e-6).patience_s(512)
    assert falling is not None
    assert falling > PATIENCE_S


def test_old_steps_fade() -> None:
    step_time = taught([1, 512] * 50)
    for _ in range(100):
        for size in (1, 512):
            step_time.observe(size, 2 * (BASE + SLOPE * size))
    assert step_time.tokens_within(0.1, 512) == pytest.approx((0.05 - BASE) / SLOPE, abs=1)


def test_prompt_cost_is_known_after_many_steps_without_one() -> None:
    """A step in which texts are generated takes as long for one as for eight, but for noise."""
    step_time, chance = taught([512], base=0, slope=0.01), random.Random(1)
    for _ in range(2000):
        num_sequences, noise = chance.randrange(1, 9), chance.uniform(0.9, 1.1)
        step_time.observe(num_sequences, 0.05 * noise, num_sequences)
        assert step_time.tokens_within(1.0, 512) < 110
    patience_s = PATIENCE_S + PATIENCE * 0.01 * 512
    assert step_time.patience_s(512) == pytest.approx(patience_s, rel=0.01)


def test_a_prompt_that_took_long_once_is_forgotten_behind_others() -> None:
    step_time = taught([512], slope=20 * SLOPE)
    for _ in range(200):
        step_time.observe(1, BASE + SLOPE, 1)
        step_time.observe(MIN_CHUNK, BASE + SLOPE * MIN_CHUNK, 1)
    assert step_time.tokens_within(0.1, 512) == pytest.approx((0.1 - BASE) / SLOPE, rel=0.05)


def test_steps_with_prompts_are_known_apart() -> None:
    step_time = StepTimeModel()
    assert step_time.mean_s(1, 1) == math.inf
    step_time.observe(4, 0.001, 4)
    step_time.observe(1, 0.003, 1)
    assert step_time.mean_s(8, 8) == pytest.approx((0.003 + 0.95 * 0.001) / 1.95)
    assert step_time.mean_s(8, 7) == math.inf
    step_time.observe(100, 0.1, 1)
    assert step_time.mean_s(8, 7) == pytest.approx(0.1)
