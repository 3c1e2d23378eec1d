"""When requests are sent."""

import numpy as np
import pytest

from headrace.bench.arrivals import Seconds, arrival_times


def times(rate: float, burstiness: float = 1.0, seed: int = 0) -> Seconds:
    return arrival_times(2000, rate, burstiness, np.random.default_rng(seed))


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert not times(float("inf")).any()


def test_the_last_request_comes_when_the_rate_says() -> None:
    due = times(50)
    assert due[-1] == pytest.approx(2000 / 50)
    assert (np.diff(due) >= 0).all()


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_a_gamma_distribution(burstiness: float) -> None:
    between = np.diff(times(10, burstiness), prepend=0)
    variation = between.std() / between.mean()
    assert variation == pytest.approx(burstiness**-0.5, rel=0.1)


def test_the_seed_decides() -> None:
    assert (times(10, seed=1) == times(10, seed=1)).all()
    assert (times(10, seed=1) != times(10, seed=2)).any()
