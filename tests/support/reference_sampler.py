"""Sampling written down plainly in numpy, one row after another: what `Sampler` must equal."""

import struct
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.execution.cpu_sampler import (
    NO_MASKS,
    NO_TOKENS,
    ROW,
    Masks,
    Sampler,
)
from headrace.engine_proc.worker.execution.executor import Floats, Int32s

Doubles = npt.NDArray[np.float64]
Rows = npt.NDArray[np.void]
U64s = npt.NDArray[np.uint64]


def make_rows(num_rows: int, **fields: float) -> Rows:
    """Return rows of one sequence at successive positions; the temperature is 1 by default."""
    rows = np.zeros(num_rows, ROW)
    rows["seed"], rows["position"] = 1, np.arange(num_rows)
    rows["temperature"], rows["top_p"], rows["repetition_penalty"] = 1, 1, 1
    rows["num_logprobs"], rows["target"] = -1, -1
    for name, value in fields.items():
        rows[name] = value
    return rows


def tell(sampler: Sampler, histories: Items[Int32s]) -> None:
    """Give a sampler whole histories, by slot."""
    updates = [(slot, 0, len(own)) for slot, own in enumerate(histories)]
    tokens = np.concatenate([NO_TOKENS, *histories])
    sampler.update_histories(np.array(updates, np.int32).reshape(-1), tokens)


def sample(
    logits: Floats,
    rows: Rows,
    histories: Items[Int32s],
    bias_tokens: Int32s,
    bias: Floats,
    masked_rows: Int32s = NO_TOKENS,
    masks: Masks = NO_MASKS,
) -> tuple[Int32s, bytes]:
    """Return what `Sampler.sample` does, of one that was told these histories."""
    tokens, logprobs = np.empty(len(rows), np.int32), b""
    mask_of = dict(zip(masked_rows.tolist(), masks, strict=True))
    for place, row in enumerate(rows):
        if row["target"] >= 0:
            tokens[place] = row["target"]
        else:
            masked = apply_mask(logits[place], mask_of.get(place))
            biased = penalize(add_biases(masked, row, bias_tokens, bias), row, histories)
            nothing_left = place in mask_of and biased.max() == -np.inf
            tokens[place] = choose(masked if nothing_left else biased, row)
        if row["num_logprobs"] >= 0:
            logprobs += report(logits[place], int(tokens[place]), int(row["num_logprobs"]))
    return tokens, logprobs


def apply_mask(logits: Floats, mask: Masks | None) -> Floats:
    """Return the logits of the tokens whose bit is set, the lowest token's first."""
    if mask is None:
        return logits
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(logits)]
    return np.where(bits, logits, np.float32(-np.inf))


def add_biases(logits: Floats, row: np.void, tokens: Int32s, bias: Floats) -> Floats:
    """Return the logits plus the row's biases, one after another."""
    biased = logits.copy()
    place = slice(row["bias_start"], row["bias_start"] + row["num_bias"])
    for token, value in zip(tokens[place], bias[place], strict=True):
        biased[token] = value if value == -np.inf else biased[token] + value
    return biased


def penalize(logits: Floats, row: np.void, histories: Items[Int32s]) -> Floats:
    """Return the logits less what the row's history costs them."""
    if not row["num_history"]:
        return logits
    seen = histories[row["history_slot"]][: row["num_history"]]
    generated = np.bincount(seen[row["num_prompt"] :], minlength=len(logits)).astype(np.float32)
    repetition = np.ones_like(logits)
    repetition[seen] = row["repetition_penalty"]
    penalized = np.where(logits > 0, logits / repetition, logits * repetition)
    penalized -= row["frequency_penalty"] * generated
    penalized -= row["presence_penalty"] * (generated > 0).astype(np.float32)
    return penalized


def choose(logits: Floats, row: np.void) -> int:
    """Return the token that is drawn."""
    if row["temperature"] == 0 or logits.max() == -np.inf:
        return int(logits.argmax())
    scores = logits.astype(np.float64) * (1 / np.float64(row["temperature"]))
    kept = candidates(scores, float(row["min_p"]), int(row["top_k"]), float(row["top_p"]))
    return int(kept[np.argmax(scores[kept] + gumbel(kept, row["seed"], row["position"]))])


def candidates(
    scores: Doubles, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0
) -> npt.NDArray[np.intp]:
    """Return the tokens that min_p, then top-k, then top-p leave, ascending; at least one."""
    order = np.argsort(-scores, kind="stable")
    below = scores[order] - scores[order[0]]
    if min_p > 0:
        order = order[below >= np.log(min_p)]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        mass = np.cumsum(np.exp(below[: len(order)]))
        # The token that reaches the target is the last one in.
        order = order[: int(np.searchsorted(mass, top_p * mass[-1])) + 1]
    return np.sort(order)


def report(logits: Floats, token: int, num_top: int) -> bytes:
    """Return a token's logprob and rank, then the likeliest tokens and theirs."""
    logits = logits.astype(np.float64)
    highest = logits.max()
    logprobs = logits - highest - np.log(np.exp(logits - highest).sum())
    packed = struct.pack("<fi", logprobs[token], 1 + int((logits > logits[token]).sum()))
    for likely in np.argsort(-logits, kind="stable")[:num_top]:
        packed += struct.pack("<if", likely, logprobs[likely])
    return packed + struct.pack("<if", -1, -np.inf) * (num_top - len(logits))


def gumbel(tokens: npt.NDArray[np.intp], seed: np.uint64, position: np.uint64) -> Doubles:
    """Return standard Gumbel noise for (seed, position, token)."""
    key = mix(mix(np.atleast_1d(seed)) + np.atleast_1d(position))
    bits = mix(key + tokens.astype(np.uint64)) >> np.uint64(12)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-52  # exact, so neither 0 nor 1
    noise: Doubles = -np.log(-np.log(uniform))
    return noise


def mix(x: U64s) -> U64s:
    """SplitMix64's step (Steele, Lea and Flood, 2014): a counter made into random bits."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
