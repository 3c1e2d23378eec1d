"""Statistics of finished sequences on the board: token counts, and queue, prefill and decode times.

Queue time ends at the first step, prefill time at the first token, decode time at the last. Aborted
sequences are not counted: their times depend on the client.
"""

from collections import Counter

from headrace.board.board import Slot, Timing
from headrace.board.fields import EngineField
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.engine_proc.sequence.sequence_output import SequenceOutput
from headrace.ipc.messages import FinishReason

SECOND_NS = 10**9
RAN = (FinishReason.STOP, FinishReason.LENGTH)
# Of each sequence, in the order of `close`.
OBSERVED = (
    Timing.WAITED,
    Timing.PREFILLED,
    Timing.DECODED,
    Timing.RAN,
    Timing.PROMPT,
    Timing.COMPUTED,
    Timing.GENERATED,
    Timing.MAX_TOKENS,
    Timing.PREEMPTED,
)


class TokenRate:
    """The rate of generated tokens for the board, in tokens per second over the recent past."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._since_ns = 0
        self._num_before = slot[
            EngineField.GENERATED_TOKENS
        ]  # of an engine in whose place this one is

    def observe(self, now_ns: int) -> None:
        """Publish tokens per second, once a second."""
        elapsed_ns = now_ns - self._since_ns
        if elapsed_ns < SECOND_NS:
            return
        num = self._slot[EngineField.GENERATED_TOKENS]
        self._slot[EngineField.TOKENS_PER_SECOND] = (
            (num - self._num_before) * SECOND_NS // elapsed_ns
        )
        self._since_ns, self._num_before = now_ns, num


class SequenceStats:
    """Counts the outputs of a step while the workers compute the next one."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._open: list[tuple[list[SequenceOutput], int]] = []
        self._rate = TokenRate(slot)

    def take(self, news: list[SequenceOutput], now_ns: int) -> None:
        """Keep what a step brought at `now_ns`, CLOCK_MONOTONIC, until `settle`."""
        self._open.append((news, now_ns))

    def settle(self) -> None:
        """Count the tokens and times taken so far."""
        for news, now_ns in self._open:
            self._count(news, now_ns)
            self._rate.observe(now_ns)
        self._open.clear()

    def stop(self, sequence: Sequence) -> None:
        """Count a sequence that its detokenizer has ended."""
        self.settle()
        if sequence.first_token_ns:
            self._close(sequence, FinishReason.STOP)

    def _count(self, news: list[SequenceOutput], now_ns: int) -> None:
        earlier: Counter[int] = Counter()
        for n in news:
            sequence = n.sequence
            if n.tokens or n.embedding is not None or not sequence.generates:
                if sequence.first_token_ns:
                    earlier[sequence.last_token_ns] += 1
                else:
                    sequence.first_token_ns = now_ns
                    begin(self._slot, sequence.num_prompt, sequence.num_cached)
                sequence.last_token_ns = now_ns
            if n.finished in RAN:
                self._close(sequence, n.finished)
        # Most have had their last token in the same step, so there are few moments.
        between = self._slot.histogram(Timing.BETWEEN)
        for then_ns, times in earlier.items():
            between.observe(now_ns - then_ns, times)

    def _close(self, s: Sequence, why: FinishReason) -> None:
        moments = (s.queued_ns, s.scheduled_ns, s.first_token_ns, s.last_token_ns)
        counts = (s.num_prompt, s.num_cached, s.num_generated, s.request.max_tokens)
        close(self._slot, why, moments, counts, s.num_preemptions)


def begin(slot: Slot, num_prompt: int, num_cached: int) -> None:
    """Count the prompt of a sequence that has its first token."""
    slot.add(EngineField.PREFILLED_TOKENS, num_prompt - num_cached)
    slot.add(EngineField.CACHED_TOKENS, num_cached)


def close(
    slot: Slot,
    why: FinishReason,
    moments: tuple[int, int, int, int],
    counts: tuple[int, int, int, int],
    num_preemptions: int = 0,
) -> None:
    """Count a sequence that has run to its end.

    Args:
        moments: when it came, began to run, had its first token, and its last; CLOCK_MONOTONIC, ns
        counts: tokens of its prompt, those of them in the cache, those generated, and how many
            there might have been
    """
    queued, scheduled, first, last = moments
    num_prompt, num_cached, num_generated, max_tokens = counts
    slot.add(EngineField.ENDED + why)
    amounts = (
        scheduled - queued,
        first - scheduled,
        last - first,
        last - scheduled,
        num_prompt,
        num_prompt - num_cached,
        num_generated,
        max_tokens,
        num_preemptions,
    )
    histograms = slot.histograms
    for span, amount in zip(OBSERVED, amounts, strict=True):
        histograms[span].observe(amount)
    if num_generated > 1:
        histograms[Timing.PER_TOKEN].observe((last - first) // (num_generated - 1))
