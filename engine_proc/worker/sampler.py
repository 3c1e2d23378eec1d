"""From logits to tokens: greedy, temperature, top-k, top-p.

The random part is Gumbel noise, a pure function of (seed, position, token): the token that
maximizes `logit / temperature + noise` has the softmax's distribution, and what else is in the
batch cannot change it. Top-p and top-k only narrow the candidates.
"""

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.executor import Floats, Int32s

U64s = npt.NDArray[np.uint64]

LIKELY = 1024  # candidates sorted first for top-p; more only where these do not reach it


ROW = np.dtype(  # messages.SAMPLING_ROW
    [
        *((name, "<u8") for name in ("seed", "position")),
        *((name, "<f4") for name in ("temperature", "top_p", "min_p")),
        *((f"{name}_penalty", "<f4") for name in ("presence", "frequency", "repetition")),
        *((name, "<i4") for name in ("top_k", "num_logprobs", "target")),
        *((name, "<i4") for name in ("history_start", "num_prompt", "num_history")),
        *((name, "<i4") for name in ("bias_start", "num_bias")),
    ]
)


def sample(logits: Floats, rows: npt.NDArray[np.void]) -> Int32s:
    """Return a token per row of `logits`, [rows, vocab]; `rows` are of `ROW`."""
    tokens: Int32s = logits.argmax(axis=1).astype(np.int32)
    for place, row in enumerate(rows):
        if row["temperature"] > 0:
            scores = logits[place].astype(np.float64) / row["temperature"]
            kept = candidates(scores, int(row["top_k"]), float(row["top_p"]))
            noise = gumbel(kept, row["seed"], row["position"])
            tokens[place] = kept[np.argmax(scores[kept] + noise)]
    return tokens


def candidates(scores: npt.NDArray[np.float64], top_k: int, top_p: float) -> npt.NDArray[np.intp]:
    """Return the tokens that top-k, then top-p leave; at least one."""
    kept = np.arange(len(scores))
    if 0 < top_k < len(scores):
        kept = np.argpartition(scores, -top_k)[-top_k:]
    if top_p >= 1:
        return kept
    weights = np.exp(scores[kept] - scores[kept].max())
    target = top_p * weights.sum()
    num_sorted = min(LIKELY, len(kept))
    while True:
        best = np.argpartition(weights, -num_sorted)[-num_sorted:]
        best = best[np.argsort(-weights[best], kind="stable")]
        mass = np.cumsum(weights[best])
        if mass[-1] >= target or num_sorted == len(kept):
            # The token that reaches the target is the last one in.
            return kept[best[: int(np.searchsorted(mass, target)) + 1]]
        num_sorted = len(kept)


def gumbel(
    tokens: npt.NDArray[np.intp], seed: np.uint64, position: np.uint64
) -> npt.NDArray[np.float64]:
    """Return standard Gumbel noise for (seed, position, token)."""
    key = mix(mix(np.atleast_1d(seed)) + np.atleast_1d(position))
    bits = mix(key + tokens.astype(np.uint64)) >> np.uint64(12)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-52  # exact, so neither 0 nor 1
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def mix(x: U64s) -> U64s:
    """SplitMix64's step (Steele, Lea and Flood, 2014): a counter made into random bits."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
