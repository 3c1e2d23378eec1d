"""What a step has brought to a sequence."""

from dataclasses import dataclass

from headrace.engine_proc.sequence.sequence import Sequence
from headrace.ipc.messages import FinishReason


@dataclass(slots=True)
class SequenceOutput:
    """The new tokens of one sequence after a step, and its finish reason."""

    sequence: Sequence
    tokens: list[int]
    finished: FinishReason | None = None
    logprobs: bytes = b""  # of `tokens`, where wanted: rows of `token_logprobs.py`
    embedding: bytes | None = None
