"""Reads a `StepResult` sequence by sequence, in the order in which `build_step` wrote the step."""

import math
from array import array

from headrace.engine_proc.sequence.chunk import Chunk
from headrace.ipc.token_logprobs import ROW, num_row_bytes
from headrace.ipc.worker_messages import StepResult


class ResultReader:
    """A cursor over a `StepResult`. Asking for more than there is raises."""

    def __init__(self, result: StepResult, num_pooled: int) -> None:
        self._tokens = iter(array("i", result.token_ids))
        self._logprobs = memoryview(result.logprobs)
        self._embeddings = memoryview(result.embeddings)
        self._embedding_bytes = len(result.embeddings) // max(1, num_pooled)

    def token(self) -> int:
        """Return the next row's token."""
        return next(self._tokens)

    def logprob(self, num_top: int) -> bytes:
        """Return the log probabilities of the row whose token came last, as the worker has them.

        Raises:
            ValueError: the result has no such row.
        """
        end = num_row_bytes(num_top)
        if len(self._logprobs) < end:
            raise ValueError(f"{len(self._logprobs)} bytes are left of a row of {end}")
        row = bytes(self._logprobs[:end])
        self._logprobs = self._logprobs[end:]
        return row

    def prompt_logprobs(self, chunk: Chunk) -> bytes:
        """Return the log probabilities of the prompt's tokens in a chunk, if they are watched."""
        rows = []
        for _ in chunk.watched:
            self.token()
            rows.append(self.logprob(chunk.sequence.request.sampling.prompt_logprobs or 0))
        return b"".join(rows)

    def draft(self) -> tuple[int, float]:
        """Return the next row's token, and its probability."""
        token = self.token()
        return token, math.exp(ROW.unpack(self.logprob(0))[0])

    def pass_over(self, chunk: Chunk) -> None:
        """Skip the columns of a sequence that has ended since."""
        sampling = chunk.sequence.request.sampling
        for _ in chunk.watched:
            self.token()
            self.logprob(sampling.prompt_logprobs or 0)
        if chunk.is_last and chunk.sequence.request.embeds:
            self.embedding()
        elif chunk.is_last and chunk.sequence.generates:
            for _ in range(len(chunk.drafts) + 1):
                self.token()
                if sampling.logprobs is not None:
                    self.logprob(sampling.logprobs)

    def embedding(self) -> bytes:
        """Return the next embedding."""
        vector = bytes(self._embeddings[: self._embedding_bytes])
        self._embeddings = self._embeddings[self._embedding_bytes :]
        return vector
