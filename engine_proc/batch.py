"""A step as arrays, for the workers."""

from array import array

from headrace.engine_proc.chunk import Chunk
from headrace.engine_proc.image_columns import ImageColumns
from headrace.engine_proc.mask_area import MaskArea
from headrace.engine_proc.sampling_rows import SamplingRows
from headrace.messages import Step


def build_step(chunks: list[Chunk]) -> Step:
    """Flatten chunks into the message that workers run. See `messages.Step`."""
    token_ids, positions, rows_of = array("i"), array("i"), array("i")
    logit_rows, pooled_rows, masked_rows = array("i"), array("i"), array("i")
    sampling = SamplingRows()
    max_bytes = 4 * max(len(chunk.sequence.pages) for chunk in chunks)
    table = []
    for row, chunk in enumerate(chunks):
        sequence, first_row = chunk.sequence, len(token_ids)
        table.append(sequence.pages.tobytes().ljust(max_bytes, b"\0"))
        if chunk.is_decode:  # nearly always
            token_ids.append(sequence.tokens[-1])
            positions.append(chunk.start)
            rows_of.append(row)
            logit_rows.append(first_row)
            sampling.draw(sequence, chunk.drafts)
            continue
        token_ids += sequence.tokens[chunk.start : chunk.start + chunk.count] + chunk.drafts
        positions.extend(range(chunk.start, chunk.start + chunk.num_tokens))
        rows_of.extend([row] * chunk.num_tokens)
        if sequence.request.embeds:
            pooled_rows.extend([len(token_ids) - 1] * chunk.is_last)
            continue
        for position in chunk.watched:
            logit_rows.append(first_row + position - chunk.start)
            sampling.watch(sequence, position + 1)
        if chunk.is_last:
            for num_drafts in range(len(chunk.drafts) + 1):
                if sequence.request.grammar:
                    masked_rows.append(len(logit_rows))
                logit_rows.append(first_row + chunk.count - 1 + num_drafts)
                sampling.draw(sequence, chunk.drafts[:num_drafts])
    images = ImageColumns(chunks)
    return Step(
        token_ids.tobytes(),
        positions.tobytes(),
        rows_of.tobytes(),
        b"".join(table),
        logit_rows.tobytes(),
        bytes(sampling.rows),
        sampling.history.tobytes(),
        sampling.bias_tokens.tobytes(),
        sampling.bias.tobytes(),
        pooled_rows.tobytes(),
        token_types(chunks) if pooled_rows else b"",
        masked_rows.tobytes(),
        images.embed_rows,
        images.rope_positions,
        images.last_seen,
    )


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


def fill_masks(chunks: list[Chunk], area: MaskArea) -> None:
    """Write the masks of a step's `masked_rows`."""
    first = 0
    for chunk in chunks:
        sequence = chunk.sequence
        if not sequence.request.grammar or not chunk.is_last:
            continue
        if sequence.matcher is None:
            for row in range(first, first + len(chunk.drafts) + 1):
                area.allow_all(row)
        else:
            sequence.matcher.fill(sequence.generated, chunk.drafts, area, first)
        first += len(chunk.drafts) + 1
