"""A step as arrays, for the workers."""

from array import array

from headrace.engine_proc.scheduler import Chunk
from headrace.messages import Step


def build_step(chunks: list[Chunk]) -> Step:
    """Flatten chunks into the message that workers run. See `messages.Step`."""
    token_ids, positions, rows_of = array("i"), array("i"), array("i")
    logit_rows, top_k = array("i"), array("i")
    temperature, top_p, noise = array("f"), array("f"), array("Q")
    max_pages = max(len(chunk.sequence.pages) for chunk in chunks)
    table = []
    for row, chunk in enumerate(chunks):
        sequence, end = chunk.sequence, chunk.start + chunk.count
        token_ids += sequence.tokens[chunk.start : end]
        positions.extend(range(chunk.start, end))
        rows_of.extend([row] * chunk.count)
        table.append(array("i", sequence.pages).tobytes().ljust(max_pages * 4, b"\0"))
        if chunk.samples:
            request = sequence.request
            logit_rows.append(len(token_ids) - 1)
            temperature.append(request.temperature)
            top_p.append(request.top_p)
            top_k.append(request.top_k)
            noise.extend((request.seed, end))
    return Step(
        token_ids.tobytes(),
        positions.tobytes(),
        rows_of.tobytes(),
        b"".join(table),
        logit_rows.tobytes(),
        temperature.tobytes(),
        top_p.tobytes(),
        top_k.tobytes(),
        noise.tobytes(),
    )
