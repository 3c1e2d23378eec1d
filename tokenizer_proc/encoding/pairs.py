"""Two texts as one sequence, for models that compare texts by reading both."""

from typing import NamedTuple

from headrace.tokenizer_proc.jobs.stages import Ids


class PairMarks(NamedTuple):
    """The special tokens around two texts."""

    begin: Ids
    middle: Ids
    end: Ids
    num_first: int | None  # of `middle`, that count to the first text; None: tokens have one type


class Pair(NamedTuple):
    """Two texts in one."""

    ids: Ids
    second_text: int  # where the second begins; 0 where the model has no token types


def pair(marks: PairMarks, first: Ids, second: Ids, limit: int | None) -> Pair:
    """Put two texts together; of what exceeds `limit`, the longer text loses its end first.

    That is "longest_first" of Hugging Face's tokenizers.
    """
    if limit is not None:
        room = max(0, limit - sum(map(len, marks[:3])))
        first, second = shortened(first, second, room)
    parts = (marks.begin, first, marks.middle, second, marks.end)
    ids = memoryview(b"".join(map(bytes, parts))).cast("I")
    if marks.num_first is None:
        return Pair(ids, 0)
    return Pair(ids, len(marks.begin) + len(first) + marks.num_first)


def shortened(first: Ids, second: Ids, room: int) -> tuple[Ids, Ids]:
    """Cut two texts so that they have at most `room` tokens together."""
    if len(first) > len(second):
        return shortened(second, first, room)[::-1]
    kept = min(len(first), room // 2)
    return first[:kept], second[: room - kept]
