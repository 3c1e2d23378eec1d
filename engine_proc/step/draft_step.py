"""Builds the `Step` in which the draft model draws a token behind each sequence's drafts."""

from array import array

from headrace.engine_proc.sequence.chunk import Chunk
from headrace.engine_proc.step.history_slots import HistorySlots
from headrace.engine_proc.step.page_columns import page_columns
from headrace.engine_proc.step.sampling_metadata import SamplingMetadata
from headrace.ipc.worker_messages import Step


def build_draft_step(chunks: list[Chunk], histories: HistorySlots | None = None) -> Step:
    """Flatten chunks of the draft model into the message that workers run.

    Args:
        histories: as in `build_step`.
    """
    token_ids, positions, rows_of = array("i"), array("i"), array("i")
    logit_rows, masked_rows = array("i"), array("i")
    sampling = SamplingMetadata(histories or HistorySlots(len(chunks)))
    for row, chunk in enumerate(chunks):
        sequence, num_known = chunk.sequence, len(chunk.sequence.tokens)
        token_ids += sequence.tokens[chunk.start : chunk.end]
        token_ids += sequence.drafts[
            max(0, chunk.start - num_known) : max(0, chunk.end - num_known)
        ]
        positions.extend(range(chunk.start, chunk.end))
        rows_of.extend([row] * chunk.count)
        if chunk.is_last:
            if sequence.is_masked:
                masked_rows.append(len(logit_rows))
            sampling.tell(sequence, num_known, sequence.drafts)
            sampling.draft(sequence, chunk.end, sequence.drafts)
            logit_rows.append(len(token_ids) - 1)
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
        masked_rows=masked_rows.tobytes(),
        is_draft=True,
        page_counts=page_counts,
        history_updates=sampling.history_updates.tobytes(),
    )
