"""Proposes draft tokens from the sequence itself: prompt lookup decoding. Pure.

The proposer finds the last earlier occurrence of the sequence's final tokens. The tokens that
followed it are the drafts (Saxena, "Prompt Lookup Decoding", 2023). A step computes the drafts
beside the last token. A draft is accepted if it equals the token sampled in its place. So the
output is bit for bit that of decoding without drafts, sampled text included. A rejected draft costs
the computation of one token.
"""

from array import array

from headrace.engine_proc.sequence.chunk import NO_TOKENS
from headrace.engine_proc.sequence.sequence import Sequence

MATCH_TOKENS = (4, 3, 2)  # looked for in this order
FIRST_LENGTH = 4
MAX_LENGTH = 15
TOKENS_PER_STEP = 16  # of all running sequences; beyond, tokens no longer come nearly for free


class NgramProposer:
    """Proposes fewer drafts the more sequences run, and the more drafts were rejected."""

    def propose(self, sequence: Sequence, num_running: int) -> "array[int]":
        """Return guesses at what follows a sequence's tokens, none where there is no match."""
        left = sequence.request.max_tokens - sequence.num_generated - 1
        wanted = sequence.draft_length or FIRST_LENGTH
        most = (TOKENS_PER_STEP - num_running) // num_running - sequence.num_uncovered
        length = min(wanted, left, most)
        return look_up(sequence.tokens, length) if length > 0 else NO_TOKENS

    def learn(self, sequence: Sequence, num_drafts: int, num_right: int) -> None:
        """Adapt the number of guesses to how the last ones fared."""
        if num_right == num_drafts:
            sequence.draft_length = min(2 * (sequence.draft_length or FIRST_LENGTH), MAX_LENGTH)
        else:
            sequence.draft_length = max(1, num_right)


def look_up(tokens: "array[int]", length: int) -> "array[int]":
    """Return the `length` tokens that followed the latest earlier occurrence of the last ones.

    Where the match overlaps the end, the text repeats itself, and so does the guess.
    """
    data = tokens.tobytes()
    for size in MATCH_TOKENS:
        if len(tokens) <= size:
            continue
        place = find_last(data, tokens[-size:].tobytes(), tokens.itemsize)
        if place is not None:
            period = len(tokens) - size - place
            follow = tokens[place + size : place + size + length]
            while len(follow) < length:
                follow += follow[-period:][: length - len(follow)]
            return follow
    return NO_TOKENS


def find_last(data: bytes, suffix: bytes, itemsize: int) -> int | None:
    """Return the index, in items, of the last place of `suffix` before the end of `data`."""
    end = len(data) - 1
    while (start := data.rfind(suffix, 0, end)) >= 0:
        if start % itemsize == 0:
            return start // itemsize
        end = start + len(suffix) - 1
    return None
