"""An engine's words on the board, as another machine's board gets them."""

from array import array
from collections.abc import Callable

from headrace.board.board import Slot
from headrace.board.fields import FIELD_WORDS, EngineField

# What a server knows of its own engines' seats, and counts itself.
OWN = {
    EngineField.MODEL,
    EngineField.SEATING,
    EngineField.IS_SPARE,
    EngineField.IS_REMOTE,
    EngineField.TAKEN_TOKENS,
    EngineField.LOADS,
    EngineField.FAILED_LOADS,
    EngineField.RETRY_NS,
}
MOMENTS = (EngineField.STEPPED_NS, EngineField.STEP_DUE_NS)
FIRST = EngineField.first_word()
MIRRORED = [word for field in EngineField if field not in OWN for word in field.words]
WORD_BYTES = 8


def read_words(
    slot: Slot, clock_ahead: int, has_unread: Callable[[], bool], with_histograms: bool
) -> bytes:
    """Return the words of an engine.

    Args:
        clock_ahead: of the reader's clock, ns.
        has_unread: whether outputs are on their way: it counts as busy. Called once the words are
            read, so what it sends in between is seen.
    """
    words = array("Q", [slot[word] for word in range(FIRST, FIELD_WORDS)])
    for moment in MOMENTS:
        if words[moment - FIRST]:
            words[moment - FIRST] += clock_ahead
    words[EngineField.IS_BUSY - FIRST] |= has_unread()
    return words.tobytes() + (slot.histogram_words.tobytes() if with_histograms else b"")


def write_words(slot: Slot, data: memoryview) -> None:
    """Write the words of an engine of another machine into its seat."""
    words = data.cast("B").cast("Q")
    for word in MIRRORED:
        slot[word] = words[word - FIRST]
    histograms = words[FIELD_WORDS - FIRST :]
    if len(histograms):
        slot.histogram_words[:] = histograms
