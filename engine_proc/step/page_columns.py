"""The columns of a step that say in which pages its sequences' keys and values are."""

from array import array

from headrace.engine_proc.sequence.chunk import Chunk


def page_columns(chunks: list[Chunk]) -> tuple[bytes, bytes]:
    """Return the pages of all chunks' sequences in order, and how many each has.

    The second column is empty where all have as many.
    """
    rows = [chunk.sequence.pages for chunk in chunks]
    counts = array("i", map(len, rows))
    is_even = counts.count(counts[0]) == len(counts)
    return b"".join(rows), b"" if is_even else counts.tobytes()
