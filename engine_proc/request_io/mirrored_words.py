"""An engine's words on the board, as another machine's board gets them."""

from array import array
from operator import gt

from headrace.board.board import Slot
from headrace.board.fields import COUNTER, FIELD_WORDS, EngineField
from headrace.ipc.sockets import Frame

# What a server knows of its own engines' seats, and counts itself.
OWN = {
    EngineField.MODEL,
    EngineField.SEATING,
    EngineField.SEATINGS,
    EngineField.IS_SPARE,
    EngineField.IS_REMOTE,
    EngineField.IS_PLACED,
    EngineField.TAKEN_TOKENS,
    EngineField.LOADS,
    EngineField.FAILED_LOADS,
    EngineField.RETRY_NS,
    EngineField.LOAD_SIZE,
    EngineField.CAN_SLEEP,
    EngineField.IS_ASLEEP,
    EngineField.SESSION,
    EngineField.LOST_SESSION,
}
MOMENTS = (EngineField.STEPPED_NS, EngineField.STEP_DUE_NS)
FIRST = EngineField.first_word()
MIRRORED = [field for field in EngineField if field not in OWN]
COUNTERS = [word for field in MIRRORED if field.kind == COUNTER for word in field.words]
OTHERS = [word for field in MIRRORED if field.kind != COUNTER for word in field.words]
WORD_BYTES = 8
END = 1 << 64  # of a word


def read_words(slot: Slot, clock_ahead: int, with_histograms: bool) -> bytes:
    """Return the words of an engine.

    Args:
        clock_ahead: of the reader's clock, ns.
    """
    words = array("Q", [slot[word] for word in range(FIRST, FIELD_WORDS)])
    for moment in MOMENTS:
        if words[moment - FIRST]:
            words[moment - FIRST] += clock_ahead
    return words.tobytes() + (slot.histogram_words.tobytes() if with_histograms else b"")


class MirroredWords:
    """An engine's seat, as its engine on another machine has it be: one session of them.

    Counters and histograms grow by what the session adds, so they count all its engines and
    restarts. Other words are taken as they are.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._counters = array("Q")  # as they came last
        self._histograms = array("Q")

    def take(self, data: Frame) -> bool:
        """Write words into the seat; return False, with nothing written, where they do not fit."""
        sizes = [WORD_BYTES * (FIELD_WORDS - FIRST)]
        sizes.append(sizes[0] + self._slot.histogram_words.nbytes)
        if memoryview(data).nbytes not in sizes:
            return False
        words = memoryview(data).cast("B").cast("Q")
        counters = array("Q", [words[word - FIRST] for word in COUNTERS])
        histograms = array("Q", words[FIELD_WORDS - FIRST :])
        if fall(self._counters, counters) or fall(self._histograms, histograms):
            return False
        for word in OTHERS:
            self._slot[word] = words[word - FIRST]
        for word, before, now in zip(COUNTERS, self._counters, counters, strict=False):
            self._slot[word] = (self._slot[word] + now - before) % END
        self._counters = counters
        if histograms:
            own = self._slot.histogram_words
            for place, (before, now) in enumerate(zip(self._histograms, histograms, strict=False)):
                if now != before:
                    own[place] = (own[place] + now - before) % END
            self._histograms = histograms
        return True


def fall(before: "array[int]", now: "array[int]") -> bool:
    """Whether a counter has become less. Nothing falls where one side has none."""
    return any(map(gt, before, now))
