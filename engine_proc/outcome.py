"""What a step brought, read in the order in which `build_step` asked."""

import struct
from array import array

from headrace.engine_proc.chunk import Chunk
from headrace.messages import TokenLogprob
from headrace.worker_messages import StepResult

ROW = struct.Struct("<fi")  # logprob, rank
PAIR = struct.Struct("<if")  # token, logprob


class Outcome:
    """A cursor over a `StepResult`. Asking for more than there is raises."""

    def __init__(self, result: StepResult, num_pooled: int) -> None:
        self._tokens = iter(array("i", result.token_ids))
        self._logprobs = memoryview(result.logprobs)
        self._embeddings = memoryview(result.embeddings)
        self._embedding_bytes = len(result.embeddings) // max(1, num_pooled)

    def token(self) -> int:
        """Return the next row's token."""
        return next(self._tokens)

    def logprob(self, num_top: int) -> TokenLogprob:
        """Return the log probabilities of the row whose token came last."""
        logprob, rank = ROW.unpack_from(self._logprobs)
        end = ROW.size + num_top * PAIR.size
        top = [pair for pair in PAIR.iter_unpack(self._logprobs[ROW.size : end])]
        self._logprobs = self._logprobs[end:]
        return TokenLogprob(logprob, rank, top)

    def pass_over(self, chunk: Chunk) -> None:
        """Go on behind what is of a sequence that has ended since."""
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
