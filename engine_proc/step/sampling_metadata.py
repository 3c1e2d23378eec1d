"""The sampling parameters of a step's rows, as arrays. Pure.

This module decides which tokens a step bans or penalizes; the workers only add.
"""

import struct
from array import array

from headrace.engine_proc.sequence.sequence import Sequence
from headrace.ipc.messages import Sampling
from headrace.ipc.worker_messages import SAMPLING_ROW

BAN = float("-inf")
POSITION, POSITION_AT = struct.Struct("<Q"), 8  # in a `SAMPLING_ROW`


class SamplingMetadata:
    """Collects the sampling columns of a `worker_messages.Step`."""

    def __init__(self) -> None:
        self.rows = bytearray()
        self.history = array("i")
        self.bias_tokens = array("i")
        self.bias = array("f")

    def draw(self, sequence: Sequence, position: int, drafts: "array[int]") -> None:
        """Add the row that draws the token at `position`, after a sequence's tokens and `drafts`.

        The last of its tokens may not be known yet, unless it `looks_back`.
        """
        if sequence.is_plain:  # only the position in its row changes
            row = sequence.sampling_row
            if not row:
                row += pack(sequence.request.sampling, 0, (0, 0, 0), (0, 0))
            POSITION.pack_into(row, POSITION_AT, position)
            self.rows += row
            return
        history = self._add_history(sequence, position, drafts)
        bias_start = len(self.bias)
        self._add_bias(sequence, position, drafts)
        bias = bias_start, len(self.bias) - bias_start
        self.rows += pack(sequence.request.sampling, position, history, bias)

    def watch(self, sequence: Sequence, position: int) -> None:
        """Add a row that reports how likely the prompt's token at `position` was."""
        num_logprobs = sequence.request.sampling.prompt_logprobs
        token = sequence.tokens[position]
        self.rows += SAMPLING_ROW.pack(
            0, position, 0, 1, 0, 0, 0, 1, 0, num_logprobs, token, 0, 0, 0, 0, 0
        )

    def _add_history(
        self, sequence: Sequence, position: int, drafts: "array[int]"
    ) -> tuple[int, int, int]:
        """Add the tokens that penalties look at; return where, how many of them are the prompt's,
        and how many there are."""
        start, sampling = len(self.history), sequence.request.sampling
        counts_prompt = sampling.repetition_penalty != 1
        if not (counts_prompt or sampling.presence_penalty or sampling.frequency_penalty):
            return start, 0, 0
        self.history += (sequence.tokens if counts_prompt else sequence.generated) + drafts
        if len(sequence.tokens) + len(drafts) < position:  # the last token is being sampled
            self.history.append(-1 - sequence.row)
        num_prompt = sequence.num_prompt if counts_prompt else 0
        return start, num_prompt, len(self.history) - start

    def _add_bias(self, sequence: Sequence, position: int, drafts: "array[int]") -> None:
        sampling = sequence.request.sampling
        if sampling.logit_bias:
            self.bias_tokens.extend(sampling.logit_bias)
            self.bias.extend(sampling.logit_bias.values())
        if sampling.min_tokens or sampling.bad_words:
            banned = banned_tokens(sequence, position, drafts)
            self.bias_tokens.extend(banned)
            self.bias.extend([BAN] * len(banned))


def pack(
    sampling: Sampling, position: int, history: tuple[int, int, int], bias: tuple[int, int]
) -> bytes:
    """Return the `SAMPLING_ROW` of a token to be drawn."""
    return SAMPLING_ROW.pack(
        sampling.seed,
        position,
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
        sampling.top_k,
        -1 if sampling.logprobs is None else sampling.logprobs,
        -1,
        *history,
        *bias,
    )


def banned_tokens(sequence: Sequence, position: int, drafts: "array[int]") -> list[int]:
    """Return what must not come at `position`, after a sequence's tokens and `drafts`: stop tokens
    that are too early, and ends of bad words."""
    sampling: Sampling = sequence.request.sampling
    banned = [word[-1] for word in sampling.bad_words if ends_with(sequence, drafts, word[:-1])]
    if position - sequence.num_prompt < sampling.min_tokens:
        banned += sequence.request.stop_token_ids
    return banned


def ends_with(sequence: Sequence, drafts: "array[int]", suffix: list[int]) -> bool:
    """Whether what has been generated, then `drafts`, ends with `suffix`; prompts do not count."""
    if not suffix:
        return True
    start = max(sequence.num_prompt, len(sequence.tokens) - len(suffix))
    tail = sequence.tokens[start:] + drafts
    return tail[-len(suffix) :].tolist() == suffix
