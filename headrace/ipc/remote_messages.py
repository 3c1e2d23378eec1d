"""Messages between the seat of a remote engine and the gateway of that engine's machine.

The process in the seat grants the engine some time, again and again; the gateway answers. Other
messages to the engine follow as they are, and its outputs follow an `Outputs`.
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


class Outputs(Message, tag="outputs", frozen=True):
    """Steps follow, each as `StepOutput` and its frame: gateway -> engine."""

    session: int
    detokenizer: int


class CachedPages(Message, tag="pages", frozen=True):
    """Changes of the prefix index: gateway -> engine. Frame: the new words, u64."""

    session: int
    places: bytes  # u32


ToGateway = Grant | GenerateRequest | Abort | StopSequence | RenewLeases | GeneratedTokens
FromGateway = SessionStatus | Outputs | CachedPages
