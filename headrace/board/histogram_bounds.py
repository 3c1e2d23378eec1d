"""Bucket bounds of histograms: ours, and those of vLLM's and SGLang's dashboards.

A histogram on the board counts by all of them, so that each can be reported exactly.
"""

from itertools import chain

Bounds = tuple[float, ...]

# Seconds. Ours go 1-2-5: two decades below a step, and as far as the longest generation.
HEADRACE: Bounds = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05,
    0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100,
)  # fmt: skip
VLLM_FIRST_TOKEN: Bounds = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
VLLM_TOKEN: Bounds = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
VLLM_REQUEST: Bounds = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60,
    120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
SGLANG_FIRST_TOKEN: Bounds = (
    0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400,
)  # fmt: skip
SGLANG_REQUEST: Bounds = (*SGLANG_FIRST_TOKEN, 600, 1200, 1800, 2400)
SGLANG_QUEUE: Bounds = (
    0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15,
    *range(20, 101, 10),
    *range(200, 1001, 100),
    1200, 1400, 1600, 1800, 2000, 2500, 3000,
)  # fmt: skip
SGLANG_TOKEN: Bounds = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08,
    0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8,
)  # fmt: skip
# As prometheus-fastapi-instrumentator's, which vLLM uses: of all requests, and of each handler's.
HTTP: Bounds = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5,
    10, 30, 60,
)  # fmt: skip
HTTP_BY_HANDLER: Bounds = (0.1, 0.5, 1)

# Tokens, and other things that are counted.
VLLM_TOKENS: Bounds = tuple(m * 10**e for e in range(7) for m in (1, 2, 5))  # to the context length
VLLM_STEP: Bounds = (1, *(2**e for e in range(3, 15)))
VLLM_PREEMPTIONS: Bounds = (1, 2, 3, 4, 5, 10, 20)
VLLM_N: Bounds = (1, 2, 5, 10, 20)
SGLANG_TOKENS: Bounds = (
    100, 300, 500, 700, 1000, 1500, *range(2000, 10_001, 1000), *range(12_500, 30_001, 2500),
    35_000, 40_000, 60_000, 80_000, 100_000, 200_000, 300_000, 400_000, 600_000, 800_000,
    1_000_000, 1_100_000,
)  # fmt: skip


def union(*families: Bounds) -> Bounds:
    """Return all bounds of all families, each once, in order."""
    return tuple(sorted(set(chain(*families))))
