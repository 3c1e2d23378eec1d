"""The interface of decoder executors: one call per engine step, on the CPU or a GPU.

An executor owns the memory of its weights, its KV pages and its state slots. The batch names the
tokens, their pages and their slots. An executor keeps no state per request, so a worker that dies
loses only the cache.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Batch:
    """The tokens of one step, flattened: decodes and prompt chunks alike.

    Tokens of one sequence are adjacent and in position order. The keys and values of a token at
    position p of sequence s belong in page `page_table[s, p // page_tokens]`, row `p %
    page_tokens`. Those of all lower positions are already there or in this batch.
    """

    token_ids: Int32s  # [tokens]
    positions: Int32s  # [tokens]
    sequences: Int32s  # [tokens], rows of `page_table`
    page_table: Int32s  # [sequences, max_pages]
    logit_rows: Int32s  # [rows], the tokens whose logits are wanted, ascending
    token_types: Int32s | None = None  # [tokens], 1 in the second of a sequence's two texts
    # Of images; None where no token of the batch needs it.
    embed_rows: Int32s | None = None  # [tokens], the row of `embeds` it comes in as; -1 is none
    embeds: Floats | None = None  # [rows, row_size of the spec], taken as they are
    rope_positions: Int32s | None = None  # [tokens, 3], of time, height and width; see `RopeTable`
    last_seen: Int32s | None = None  # [tokens], the last position it sees, in this batch, too
    # The row of the batch before whose drawn token comes in; -1 is none. None relays nothing.
    token_sources: Int32s | None = None  # [tokens]
    # Of decoders with states. No slot is in both.
    state_in: Int32s | None = None  # [sequences], slots with their states; -1 is at position 0
    state_out: Int32s | None = None  # [sequences], slots that get those behind their last tokens
    # [sequences], the token before which the written state ends: from there on are drafts
    state_ends: Int32s | None = None
    adapters: Int32s | None = None  # [sequences], the slots of their adapters; -1 is none
    is_draft: bool = False  # for the layer that drafts; see `MtpExecutor`


def sequence_rows(batch: Batch) -> list[slice]:
    """Cut the batch where its sequence changes."""
    cuts = (np.flatnonzero(np.diff(batch.sequences)) + 1).tolist()
    return list(map(slice, [0, *cuts], [*cuts, len(batch.sequences)]))


@dataclass(frozen=True)
class Logits:
    """The logits of a step's rows."""

    rows: Floats  # [rows, vocab_size]
    # [rows, blocks of 64 tokens], the largest of each, where an executor finds them on its way.
    maxima: Floats | None = None


class Executor(Protocol):
    """Runs a decoder."""

    def logits(self, batch: Batch) -> Logits:
        """Write the batch's keys and values; return its rows' logits, there until the next step."""
        ...

    def embed(self, batch: Batch) -> Floats:
        """Do as `logits`, but return the hidden states before the head, [rows, hidden_size]."""
        ...
