"""Messages between machines: to and from engines, and to and from stages of pipelines.

The process in the seat grants a remote engine, or a stage's worker, some time, again and again. The
gateway, or the stage, answers. Other messages to an engine follow as they are, and its outputs
follow an `Outputs`. Behind a `Member`, requests come from tokenizers, and outputs go to
detokenizers, without the seat. What an engine and a stage's worker have for each other goes as they
encode it. Hidden states go from one stage's machine to the next.
"""

import enum

from headrace.ipc.messages import (
    Abort,
    GeneratedTokens,
    GenerateRequest,
    Message,
    RenewLeases,
    StopSequence,
)

LEASE_S = 1.0  # that a grant lasts
NO_SESSION = 0


class SessionState(enum.IntEnum):
    """What the gateway makes of a session."""

    WAITING = 0  # the engine starts, or ends what it had before
    SERVING = 1
    REFUSED = 2  # as long as nothing changes
    LOST = 3  # another session may follow


class Grant(Message, tag="grant", frozen=True):
    """The remote engine may go on for a while: engine -> gateway. The first begins a session."""

    session: int  # at random; not 0
    sent_at: int  # CLOCK_MONOTONIC, ns
    clock_ahead: int | None  # this clock less the gateway's, ns; None is not known yet
    engine: int  # its seat in the server
    starts: list[int]  # of processes in each frontend's seat
    terms: dict[str, str]  # what both sides have to have alike


class SessionStatus(Message, tag="status", frozen=True):
    """The answer to a grant: gateway -> engine. Frame: the remote engine's words on its board.

    They are those of its fields, now and then with those of its histograms; none where it does not
    serve.
    """

    session: int
    granted_at: int  # `sent_at` of the last grant
    at: int  # CLOCK_MONOTONIC, ns
    state: SessionState
    why: str = ""  # it does not serve
    num_taken: int = 0  # tokens of prompts that the engine has taken in this session


class Member(Message, tag="member", frozen=True):
    """The sender is of a session's server: tokenizer or detokenizer -> gateway.

    Requests may follow, each as `GenerateRequest` and its frame. Where none do, the gateway answers
    with the same message, or with `NO_SESSION` where it has another session.
    """

    session: int
    detokenizer: int  # whose steps are to come to the sender; -1 is none


class Outputs(Message, tag="outputs", frozen=True):
    """Steps follow, each as `StepOutput` and its frame: gateway -> engine or detokenizer."""

    session: int
    detokenizer: int


class CachedPages(Message, tag="pages", frozen=True):
    """Changes of a prefix index: gateway -> engine. Frame: the new words, u64."""

    session: int
    places: bytes  # u32
    index: int = 0  # 0 is the engine's, 1 that of its store's memory


class StageGrant(Message, tag="stage_grant", frozen=True):
    """The stage may go on for a while: seat -> stage. The first begins a run."""

    run: int  # of all workers of an engine that have started together; at random
    sent_at: int  # CLOCK_MONOTONIC, ns
    stage: int
    following: str | None  # where the next stage is; None while that is not known, or in the last
    execution: bytes  # an `ExecutionConfig`, as msgpack
    watchdog_timeout: int  # seconds
    terms: dict[str, str]  # what both machines have to have alike
    wishes: list[int]  # how often operators have asked for each one of `PROFILE`


class StageStatus(Message, tag="stage_status", frozen=True):
    """The answer to a grant, or the end of a run: stage -> seat."""

    run: int
    granted_at: int  # `sent_at` of the last grant
    progress: int = 0  # of the worker's start, as on the board
    why: str = ""  # the stage does not serve, or does no more
    has_ended: bool = False  # the run; another grant begins it anew
    exit_status: int | None = None  # of a worker that has ended or was sent what is wrong
    output: str = ""  # of a worker that has ended: the end of its log, and its stacks
    kernels: str = ""  # of `best_kernels` there; they decide about bits


class WorkerInput(Message, tag="worker_input", frozen=True):
    """For the worker: seat -> stage. Frame: a `ToWorker`; behind a `Masks`, the masks."""

    run: int


class WorkerOutput(Message, tag="worker_output", frozen=True):
    """Of the worker: stage -> seat. Frame: a `FromWorker`."""

    run: int


class HiddenFrame(Message, tag="hidden", frozen=True):
    """Hidden states of a step: seat or stage -> stage. Frame: the rows, f32.

    One whose step has failed has no rows, and no frame.
    """

    run: int
    number: int  # of the frame in its run, from 0
    num_rows: int


ToGateway = Grant | Member | GenerateRequest | Abort | StopSequence | RenewLeases | GeneratedTokens
FromGateway = SessionStatus | Outputs | CachedPages
ToStage = StageGrant | WorkerInput | HiddenFrame
FromStage = StageStatus | WorkerOutput


def differences(theirs: dict[str, str], own: dict[str, str]) -> str:
    """Return in what a machine differs from the server's; "" is nothing."""
    return "; ".join(
        f"{name}: {theirs.get(name, 'none')} at the server, {own.get(name, 'none')} here"
        for name in {**theirs, **own}
        if theirs.get(name) != own.get(name)
    )
