"""What a step has brought, as a message to a detokenizer."""

import time
from array import array

import msgspec

from headrace.engine_proc.sequence.sequence_output import SequenceOutput
from headrace.ipc.messages import FinishReason, StepOutput

CUT_OFF = (FinishReason.ABORT, FinishReason.REFUSED)


def step_output(
    news: list[SequenceOutput],
    failed: dict[int, bytes] | None = None,
    reasons: dict[int, str] | None = None,
    invalid: list[int] | None = None,
) -> tuple[StepOutput, bytes]:
    """Return the message and its token ids; sequences in it count as started from here on."""
    starting = [n.sequence for n in news if not n.sequence.has_started]
    cut_off = {n.sequence.id for n in news if n.finished in CUT_OFF}  # prompts lack rows
    watched = [s for s in starting if s.needs_prompt_logprobs and s.id not in cut_off]
    output = StepOutput.of(
        started={s.id: s.request.plan for s in starting},
        ids=[n.sequence.id for n in news],
        counts=[len(n.tokens) for n in news],
        finished=[n.finished for n in news],
        cached={s.id: s.num_cached for s in starting if s.num_cached},
        logprobs={n.sequence.id: n.logprobs for n in news if n.logprobs},
        prompts={s.id: s.tokens[: s.num_prompt].tobytes() for s in watched},
        prompt_logprobs={s.id: bytes(s.prompt_logprobs) for s in watched},
        embeddings={n.sequence.id: n.embedding for n in news if n.embedding is not None},
        failed=failed or {},
        reasons=reasons or {},
        invalid=invalid or [],
    )
    now_ns = time.monotonic_ns()
    for sequence in starting:
        sequence.has_started = True
        sequence.prompt_logprobs.clear()
        if sequence.request.times is not None:
            output.times[sequence.id] = msgspec.structs.replace(
                sequence.request.times,
                queued=sequence.queued_ns,
                scheduled=sequence.scheduled_ns,
                first_token=now_ns,
            )
    return output, array("I", (token for n in news for token in n.tokens)).tobytes()
