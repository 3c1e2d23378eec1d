"""The sampling parameters of a step's rows, as arrays. Pure.

This module decides which tokens a step bans or penalizes; the workers only add.
"""

import struct
from array import array
from operator import attrgetter

from headrace.engine_proc.sequence.sequence import Sequence
from headrace.engine_proc.step.history_slots import HistorySlots
from headrace.ipc.messages import Sampling
from headrace.ipc.worker_messages import SAMPLING_CODES, SAMPLING_ROW, SamplingRow, sampling_offset

BAN = float("-inf")
# The fields of a row that are those of the request, and their values.
PARAMETERS = [name for name in SamplingRow._fields if name in Sampling.__struct_fields__]
VALUES = attrgetter(*PARAMETERS)
# The fields of a row that differ between steps; the rest is packed once per sequence.
POSITION = struct.Struct("<" + SAMPLING_CODES["position"])
POSITION_AT = sampling_offset("position")
NUM_LOGPROBS = struct.Struct("<" + SAMPLING_CODES["num_logprobs"])
NUM_LOGPROBS_AT = sampling_offset("num_logprobs")
HISTORY_AND_BIAS = ("history_slot", "num_prompt", "num_history", "bias_start", "num_bias")
PLACES = struct.Struct("<" + "".join(SAMPLING_CODES[name] for name in HISTORY_AND_BIAS))
PLACES_AT = sampling_offset(HISTORY_AND_BIAS[0])
assert SamplingRow._fields[-len(HISTORY_AND_BIAS) :] == HISTORY_AND_BIAS, "they end the row"
SEED, *OTHERS = PARAMETERS
FIRST = (SEED, "position", *OTHERS, "num_logprobs")
assert SamplingRow._fields[: len(FIRST)] == FIRST, "they begin the row"
REQUEST = struct.Struct("<" + "".join(SAMPLING_CODES[name] for name in FIRST))
REST = SAMPLING_ROW.pack(*SamplingRow())[REQUEST.size :]  # of a row without history and bias


class SamplingMetadata:
    """Collects the sampling columns of a `worker_messages.Step`.

    Args:
        histories: what workers know from the steps before; they will know what is collected, too.
    """

    def __init__(self, histories: HistorySlots) -> None:
        histories.drop_ended()
        self._histories = histories
        self.rows = bytearray()
        self.history = array("i")
        self.history_updates = array("i")
        self.bias_tokens = array("i")
        self.bias = array("f")

    def tell(self, sequence: Sequence, end: int, drafts: "array[int]") -> None:
        """Add what workers do not know of a sequence with penalties, before any row that draws.

        Args:
            end: so many tokens it has; the last may be being sampled by the step before.
            drafts: of the rows that come; they are told again, or replaced, the next time.
        """
        first = first_penalized(sequence)
        if first is None:
            return
        slot = self._histories.find(sequence)
        start, slot.num_known = slot.num_known, end - first
        assert start <= slot.num_known, "workers know more than there is"
        new = sequence.tokens[first + start :]
        if len(sequence.tokens) < end:
            new.append(-1 - sequence.row)
        new += drafts
        if new:
            self.history_updates.extend((slot.number, start, len(new)))
            self.history += new

    def draw(self, sequence: Sequence, position: int, drafts: "array[int]") -> None:
        """Add the row that draws the token at `position`, after a sequence's tokens and `drafts`.

        The last of its tokens may not be known yet, unless it `looks_back`. Those of one with
        penalties are told.
        """
        row = sequence.sampling_row
        if not row:
            row += pack(sequence.request.sampling)
        POSITION.pack_into(row, POSITION_AT, position)
        if not sequence.is_plain:
            history = self._history(sequence, position)
            bias_start = len(self.bias)
            self._add_bias(sequence, position, drafts)
            num_bias = len(self.bias) - bias_start
            PLACES.pack_into(row, PLACES_AT, *history, bias_start, num_bias)
        self.rows += row

    def draft(self, sequence: Sequence, position: int, drafts: "array[int]") -> None:
        """Add the row that drafts the token at `position`, and reports its probability."""
        self.draw(sequence, position, drafts)
        NUM_LOGPROBS.pack_into(self.rows, len(self.rows) - SAMPLING_ROW.size + NUM_LOGPROBS_AT, 0)

    def watch(self, sequence: Sequence, position: int) -> None:
        """Add a row that reports how likely the prompt's token at `position` was."""
        num_logprobs = sequence.request.sampling.prompt_logprobs
        assert num_logprobs is not None, "a request without them watches nothing"
        token = sequence.tokens[position]
        row = SamplingRow(position=position, num_logprobs=num_logprobs, target=token)
        self.rows += SAMPLING_ROW.pack(*row)

    def _history(self, sequence: Sequence, position: int) -> tuple[int, int, int]:
        """Return where the tokens are that penalties look at, how many of them are the prompt's,
        and how many there are."""
        first = first_penalized(sequence)
        if first is None:
            return 0, 0, 0
        number = self._histories.find(sequence).number
        return number, sequence.num_prompt - first, position - first

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
    sampling: Sampling,
    position: int = 0,
    history: tuple[int, int, int] = (0, 0, 0),
    bias: tuple[int, int] = (0, 0),
) -> bytes:
    """Return the `SAMPLING_ROW` of a token to be drawn."""
    num_logprobs = -1 if sampling.logprobs is None else sampling.logprobs
    seed, *others = VALUES(sampling)
    row = bytearray(REQUEST.pack(seed, position, *others, num_logprobs) + REST)
    PLACES.pack_into(row, PLACES_AT, *history, *bias)
    return bytes(row)


def first_penalized(sequence: Sequence) -> int | None:
    """Return from which token on a sequence's penalties look at it; None is without any."""
    sampling = sequence.request.sampling
    if sampling.repetition_penalty != 1:
        return 0
    return sequence.num_prompt if sampling.presence_penalty or sampling.frequency_penalty else None


def banned_tokens(sequence: Sequence, position: int, drafts: "array[int]") -> list[int]:
    """Return what must not come at `position`, after a sequence's tokens and `drafts`: stop tokens
    that are too early, and ends of bad words."""
    sampling: Sampling = sequence.request.sampling
    banned = [word[-1] for word in sampling.bad_words if ends_with(sequence, drafts, word[:-1])]
    if position - sequence.num_prompt < sampling.min_tokens:
        banned += sequence.request.stop_token_ids
    return banned


def ends_with(sequence: Sequence, drafts: "array[int]", suffix: list[int]) -> bool:
    """Whether the generated tokens, then `drafts`, end with `suffix`; prompts do not count."""
    if not suffix:
        return True
    start = max(sequence.num_prompt, len(sequence.tokens) - len(suffix))
    tail = sequence.tokens[start:] + drafts
    return tail[-len(suffix) :].tolist() == suffix
