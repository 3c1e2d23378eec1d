"""Drafts from a text: a copy is drafted with the edits that it makes."""

from scheduler_rig import make_sequence

from headrace.engine_proc.scheduling.speculation import Speculation
from headrace.engine_proc.sequence.chunk import NO_TOKENS, Chunk
from headrace.engine_proc.sequence.sequence import Sequence

SOURCE = [20, 21, 22, 23, 24, 25, 9, 26, 27, 28, 29, 9, 30, 31]


def decoding(tokens: list[int]) -> Sequence:
    """Return a sequence whose last token is to be computed."""
    sequence = make_sequence(tokens, 50)
    sequence.num_prompt = len(SOURCE)
    sequence.num_computed = len(tokens) - 1
    return sequence


def drafted(speculation: Speculation, sequence: Sequence) -> list[int]:
    assert speculation.next_chunks([sequence], 64) == []
    return speculation.propose(sequence, 15).tolist()


def test_copy_is_drafted_with_its_edits() -> None:
    speculation = Speculation()
    sequence = decoding([*SOURCE, 20, 21, 22, 23])
    chunk = Chunk(sequence, 0, 1, NO_TOKENS, is_last=True)
    speculation.observe([chunk], 0.1)  # rows cost little
    for news, expected in (([], [24, 25, 9]), ([24, 25, 50], [26, 27]), ([26], [27, 28, 29, 50])):
        sequence.tokens.extend(news)
        sequence.num_computed = len(sequence.tokens) - 1
        sequence.num_expected = len(sequence.tokens)
        assert drafted(speculation, sequence)[: len(expected)] == expected
