"""The step that takes the most memory: as many tokens and rows as the flags allow.

It launches all that any step may: no later one waits for a compiler.
"""

import msgspec
import numpy as np

from headrace.engine_proc.step.sampling_metadata import pack
from headrace.ipc.messages import MAX_LOGPROBS, Sampling
from headrace.ipc.worker_messages import Step

# All that takes memory at once: a row's tokens in order, what it has had, the likeliest.
ALL_AT_ONCE = Sampling(
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logprobs=MAX_LOGPROBS,
)


def largest_step(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    page_tokens: int,
    embeds: bool = False,
) -> Step:
    """Return a step in which every sequence ends at its full length and needs its row.

    Each row has a bias, and the first one a mask.

    All keys are in page 0, so there need be no other.
    """
    counts = token_counts(max_num_seqs, max_num_batched_tokens, max_model_len)
    num_tokens, num_rows = sum(counts), len(counts)
    positions = [np.arange(max_model_len - count, max_model_len) for count in counts]
    last_tokens = np.cumsum(counts) - 1
    rows = b"" if embeds else last_tokens.astype(np.int32).tobytes()
    sampling = pack(ALL_AT_ONCE, max_model_len, (0, 1, 2), (0, 1))
    return Step(
        token_ids=bytes(4 * num_tokens),
        positions=np.concatenate(positions).astype(np.int32).tobytes(),
        sequences=np.repeat(np.arange(num_rows, dtype=np.int32), counts).tobytes(),
        page_table=bytes(4 * num_rows * -(-max_model_len // page_tokens)),
        logit_rows=rows,
        rows=b"" if embeds else sampling * num_rows,
        history=bytes(4 * 2),
        history_updates=np.array([0, 0, 2], np.int32).tobytes(),
        bias_tokens=bytes(4),
        bias=bytes(4),
        masked_rows=b"" if embeds else bytes(4),
        pooled_rows=last_tokens.astype(np.int32).tobytes() if embeds else b"",
    )


def seen_whole(step: Step) -> Step:
    """Return the same step, but the tokens of each sequence see each other."""
    positions, sequences = (
        np.frombuffer(column, np.int32) for column in (step.positions, step.sequences)
    )
    ends = np.searchsorted(sequences, sequences, side="right") - 1
    return msgspec.structs.replace(step, last_seen=positions[ends].tobytes())


def token_counts(max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> list[int]:
    """Return how many tokens each sequence has: as few sequences as can be have prompts."""
    num_seqs = min(max_num_seqs, max_num_batched_tokens)
    left = max_num_batched_tokens - num_seqs  # beyond the one of each
    counts = []
    for _ in range(num_seqs):
        more = min(left, max_model_len - 1)
        counts.append(1 + more)
        left -= more
    return counts


def fewest_sequences(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
) -> list[int]:
    """Return the numbers of sequences of the largest steps that have prompts alone.

    One such step has whole prompts, and one the most tokens. If any step has wide tiles of
    attention (`Tiling.rows_for`), one of these has.
    """
    whole = max(1, max_num_batched_tokens // max_model_len)
    most = -(-max_num_batched_tokens // max_model_len)
    return sorted({min(max_num_seqs, number) for number in (whole, most)})
