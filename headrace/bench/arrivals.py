"""Arrival times of requests."""

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]


def arrival_times(
    num_requests: int, rate: float, burstiness: float, random: np.random.Generator
) -> Seconds:
    """Return when each request is due, seconds after the start, in order.

    The times between are drawn from a gamma distribution of shape `burstiness`: 1 makes a Poisson
    process, less comes in bursts, more is more regular. They are then scaled so that the last
    request is due exactly at `num_requests / rate`. An infinite rate sends all at once.
    """
    if np.isinf(rate):
        return np.zeros(num_requests)
    between = random.gamma(burstiness, 1 / (rate * burstiness), num_requests)
    times = np.cumsum(between)
    scaled: Seconds = times * (num_requests / rate / times[-1]) if num_requests else times
    return scaled
