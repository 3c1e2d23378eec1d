"""Builds the `Step` messages for the workers from the chunks of the scheduler."""

from array import array

from headrace.engine_proc.sequence.chunk import Chunk
from headrace.engine_proc.sequence.pooled_adapter import NO_SLOT, slot_of
from headrace.engine_proc.sequence.sequence import NO_STATE, Sequence
from headrace.engine_proc.shm.grammar_bitmask import GrammarBitmask
from headrace.engine_proc.step.draft_step import build_draft_step
from headrace.engine_proc.step.history_slots import HistorySlots
from headrace.engine_proc.step.image_columns import ImageColumns
from headrace.engine_proc.step.page_columns import page_columns
from headrace.engine_proc.step.sampling_metadata import SamplingMetadata
from headrace.ipc.worker_messages import Step

UNKNOWN = 0  # a token
KNOWN = -1  # the row of a relay


class StepBuilder:
    """Builds all steps, those of the draft model included, in the order in which workers run them.

    Args:
        max_num_seqs: no step has more sequences.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._histories = HistorySlots(max_num_seqs)

    def build(self, chunks: list[Chunk]) -> Step:
        """Return the step of some chunks of the model, or of the draft model."""
        build = build_draft_step if chunks[0].is_draft else build_step
        return build(chunks, self._histories)

    def start_over(self) -> None:
        """Note that workers may know nothing of the steps so far: those in flight are lost."""
        self._histories.forget()


def build_step(chunks: list[Chunk], histories: HistorySlots | None = None) -> Step:
    """Flatten chunks into the message that workers run. See `worker_messages.Step`.

    Args:
        histories: what workers know from steps before; nothing by default.
    """
    token_ids, positions, rows_of = array("i"), array("i"), array("i")
    logit_rows, pooled_rows, masked_rows = array("i"), array("i"), array("i")
    token_sources: dict[int, int] = {}  # rows of the step before, by token
    sampling = SamplingMetadata(histories or HistorySlots(len(chunks)))
    for row, chunk in enumerate(chunks):
        sequence, first_row = chunk.sequence, len(token_ids)
        known = sequence.tokens[chunk.start : chunk.start + chunk.count]
        token_ids += known
        if len(known) < chunk.count:  # the last one is being sampled
            token_sources[len(token_ids)] = sequence.row
            token_ids.append(UNKNOWN)
        if chunk.is_decode:  # nearly always
            positions.append(chunk.start)
            rows_of.append(row)
            sampling.draw(sequence, chunk.start + 1, chunk.drafts)
            sequence.row = len(logit_rows)
            logit_rows.append(first_row)
            continue
        token_ids += chunk.drafts
        positions.extend(range(chunk.start, chunk.start + chunk.num_tokens))
        rows_of.extend([row] * chunk.num_tokens)
        if sequence.request.embeds:
            pooled_rows.extend([len(token_ids) - 1] * chunk.is_last)
            continue
        for position in chunk.watched:
            logit_rows.append(first_row + position - chunk.start)
            sampling.watch(sequence, position + 1)
        if chunk.is_last and sequence.generates:
            sampling.tell(sequence, chunk.end, chunk.drafts)
            for num_drafts in range(len(chunk.drafts) + 1):
                if sequence.is_masked:
                    masked_rows.append(len(logit_rows))
                sampling.draw(sequence, chunk.end + num_drafts, chunk.drafts[:num_drafts])
                sequence.row = len(logit_rows)
                logit_rows.append(first_row + chunk.count - 1 + num_drafts)
    images = ImageColumns(chunks)
    adapters = array("i", [slot_of(chunk.sequence.adapter) for chunk in chunks])
    state_in, state_out, state_ends = state_columns(chunks)
    page_table, page_counts = page_columns(chunks)
    return Step(
        token_ids=token_ids.tobytes(),
        positions=positions.tobytes(),
        sequences=rows_of.tobytes(),
        page_table=page_table,
        logit_rows=logit_rows.tobytes(),
        rows=bytes(sampling.rows),
        history=sampling.history.tobytes(),
        bias_tokens=sampling.bias_tokens.tobytes(),
        bias=sampling.bias.tobytes(),
        pooled_rows=pooled_rows.tobytes(),
        token_types=token_types(chunks) if pooled_rows else b"",
        masked_rows=masked_rows.tobytes(),
        embed_rows=images.embed_rows,
        rope_positions=images.rope_positions,
        last_seen=images.last_seen,
        token_sources=relay_column(token_sources, len(token_ids)),
        state_in=state_in,
        state_out=state_out,
        state_ends=state_ends,
        adapters=b"" if max(adapters) == NO_SLOT else adapters.tobytes(),
        page_counts=page_counts,
        history_updates=sampling.history_updates.tobytes(),
    )


def state_columns(chunks: list[Chunk]) -> tuple[bytes, bytes, bytes]:
    """Return the slots that states are read from and written to, and where those end.

    The columns are empty where sequences have no states; the last also where states cover all.
    """
    if chunks[0].state_out == NO_STATE:
        return b"", b"", b""
    state_in = array("i", [chunk.state_in for chunk in chunks])
    state_out = array("i", [chunk.state_out for chunk in chunks])
    return state_in.tobytes(), state_out.tobytes(), end_column(chunks)


def end_column(chunks: list[Chunk]) -> bytes:
    """Return the token of the step before which each state ends, unless states cover all."""
    ends, first_row = array("i"), 0
    covers_all = True
    for chunk in chunks:
        ends.append(first_row + chunk.state_end - chunk.start)
        first_row += chunk.num_tokens
        covers_all = covers_all and ends[-1] == first_row
    return b"" if covers_all else ends.tobytes()


def relay_column(token_sources: dict[int, int], num_tokens: int) -> bytes:
    """Return which row of the step before draws each token, where one does."""
    if not token_sources:
        return b""
    return array("i", [token_sources.get(place, KNOWN) for place in range(num_tokens)]).tobytes()


def token_types(chunks: list[Chunk]) -> bytes:
    """Return which of its sequence's two texts each token is in, where there are two."""
    if not any(chunk.sequence.request.second_text for chunk in chunks):
        return b""
    types = array("i")
    for chunk in chunks:
        second = chunk.sequence.request.second_text or chunk.start + chunk.num_tokens
        positions = range(chunk.start, chunk.start + chunk.num_tokens)
        types.extend(position >= second for position in positions)
    return types.tobytes()


def fill_masks(chunks: list[Chunk], area: GrammarBitmask) -> None:
    """Write the masks of a step's `masked_rows`."""
    first = 0
    for chunk in chunks:
        sequence = chunk.sequence
        if not (sequence.is_masked and chunk.is_last and sequence.generates):
            continue
        rows = range(first, first + len(chunk.drafts) + 1)
        if chunk.is_draft:
            fill_draft_mask(sequence, area, first)
        elif sequence.matcher is None or sequence.has_ended:
            for row in rows:
                area.allow_all(row)
        else:
            sequence.matcher.fill(sequence.generated, chunk.drafts, area, first)
        if sequence.request.allowed and not (sequence.has_ended or chunk.is_draft):
            restrict(sequence, rows, area)
        first = rows.stop


def fill_draft_mask(sequence: Sequence, area: GrammarBitmask, row: int) -> None:
    """Write the mask of the token that is drafted next. A mask without a token bans nothing."""
    if sequence.matcher is None:
        area.allow_all(row)
    else:
        sequence.matcher.fill_next(sequence.generated, sequence.drafts, area, row)
    allowed = sequence.request.allowed
    if allowed and not area.allow_only(row, allowed):
        area.allow_all(row)


def restrict(sequence: Sequence, rows: range, area: GrammarBitmask) -> None:
    """Leave in the masks of a sequence only the tokens that its request allows.

    A mask that loses all its tokens bans nothing. If it is the first, the sequence is stuck.
    """
    for row in rows:
        if not area.allow_only(row, sequence.request.allowed):
            area.allow_all(row)
            sequence.has_no_token = sequence.has_no_token or row == rows.start
