"""Every message that crosses a process border, grouped by receiver.

Messages are msgspec Structs on ZeroMQ or in shared memory; bulk (bodies, token ids, response
bytes) rides in a frame of its own beside the message. New fields go last, with a default.

Ids: the frontend draws a request id, and whoever answers finds the way back in it. A request has
one or more *sequences* (`n`, several prompts), each with an id of its own:

    frontend (8 bits) | counter (40 bits) | sequence (16 bits, 0 in the request's own id)
"""

import enum
import hashlib
from typing import get_args, get_type_hints

import msgspec

SEQUENCE_BITS = 16
COUNTER_BITS = 40
MAX_SEQUENCES = 1 << SEQUENCE_BITS


def request_id(frontend: int, counter: int) -> int:
    """Return the id of a frontend's `counter`-th request."""
    return (frontend << COUNTER_BITS | counter % (1 << COUNTER_BITS)) << SEQUENCE_BITS


def request_of(sequence: int) -> int:
    """Return the id of the request a sequence belongs to."""
    return sequence >> SEQUENCE_BITS << SEQUENCE_BITS


def frontend_of(id: int) -> int:
    """Return the index of the frontend that holds a request's connection."""
    return id >> (COUNTER_BITS + SEQUENCE_BITS)


class FinishReason(enum.IntEnum):
    """Why a sequence ended. `STOP` and `LENGTH` are what a client may see."""

    STOP = 0  # a stop token, EOS included, or a stop string
    LENGTH = 1  # max_tokens or the context length
    ABORT = 2  # the client left


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of all messages: positional, immutable, no reference cycles."""


# To a tokenizer process


class HttpRequest(Message, tag="http", frozen=True):
    """One HTTP request, read whole: frontend -> tokenizer. Frame: the body."""

    id: int
    method: str
    path: str
    received_at: float  # seconds since the epoch, when the head was read


ToTokenizer = HttpRequest


# To the engine


class GenerateRequest(Message, tag="generate", frozen=True):
    """One sequence to continue: tokenizer -> engine. Frame: prompt token ids, u32, at least one."""

    id: int
    detokenizer: int  # index of the process that turns its tokens into a response
    max_tokens: int  # at least 1; prompt and max_tokens together fit the context
    temperature: float  # 0 is greedy
    top_p: float
    top_k: int  # 0 is all
    seed: int
    stop_token_ids: list[int]  # EOS among them unless it is ignored
    plan: bytes  # a `ReplyPlan`; the engine hands it on unread


class Abort(Message, tag="abort", frozen=True):
    """Stop all sequences of a request: frontend -> engine (the client left). May overtake it."""

    request: int


class Stop(Message, tag="stop", frozen=True):
    """End one sequence: detokenizer -> engine, after a stop string. Nothing more is sent for it."""

    id: int


ToEngine = GenerateRequest | Abort | Stop


# To a detokenizer process


class ReplyPlan(Message, frozen=True):
    """What the tokenizer process knows of a reply: tokenizer -> detokenizer, through the engine."""

    response_id: str  # "chatcmpl-…" or "cmpl-…"
    model: str
    created: int  # seconds since the epoch
    chat: bool
    stream: bool
    include_usage: bool
    num_sequences: int  # of the request
    num_prompt_tokens: int  # of this sequence
    index: int  # of this sequence, as `choices[].index`
    stop: list[str]
    include_stop: bool  # whether the stop string stays in the text
    skip_special_tokens: bool
    echo: str = ""  # goes before the first token's text
    shares_prompt: bool = False  # another sequence of the request counts this prompt's tokens


class StepOutput(Message, tag="step", frozen=True):
    """New tokens of one engine step: engine -> detokenizer. Frame: their ids, u32, concatenated.

    The columns `ids`, `counts` and `finished` have one entry per sequence with news. A count is 0
    only where a sequence ended without a new token.
    """

    started: dict[int, bytes]  # the `ReplyPlan` of each sequence seen for the first time
    ids: list[int]
    counts: list[int]
    finished: list[FinishReason | None]
    cached: dict[int, int] = {}  # prompt tokens found in the prefix cache, of those in `started`


ToDetokenizer = StepOutput


# To a frontend


class Head(Message, frozen=True):
    """Status line and content type of a response."""

    status: int
    content_type: str


class ResponseFrames(Message, tag="frames", frozen=True):
    """Response bytes ready to write: detokenizer or tokenizer -> frontend, one per step.

    Frame: the bytes of all entries, concatenated. The columns `ids`, `lengths` and `last` have
    one entry per request; `heads` comes once per request, with its first bytes.
    """

    heads: dict[int, Head]
    ids: list[int]
    lengths: list[int]
    last: list[bool]


ToFrontend = ResponseFrames


# Between the engine and its workers, in shared memory


class Step(Message, tag="step", frozen=True):
    """What to run: engine -> every worker, once per step. Arrays are little-endian.

    The first five fields are those of `executor.Batch`; the sampling columns have one entry per
    logit row. `noise` identifies the random draw of a row: a sequence's seed and the position of
    the token drawn, so that batch mates never change a result.
    """

    token_ids: bytes  # i32
    positions: bytes  # i32
    sequences: bytes  # i32
    page_table: bytes  # i32, row-major
    logit_rows: bytes  # i32
    temperature: bytes  # f32
    top_p: bytes  # f32
    top_k: bytes  # i32
    noise: bytes  # u64 pairs: seed, position


class StepResult(Message, tag="result", frozen=True):
    """The sampled token of each logit row: worker 0 -> engine."""

    token_ids: bytes  # i32


class WorkerReady(Message, tag="ready", frozen=True):
    """The worker has loaded its weights and mapped its pages: worker 0 -> engine, once."""

    num_pages: int
    page_tokens: int


ToWorker = Step
FromWorker = StepResult | WorkerReady


def fingerprint() -> str:
    """Return a hash of all message definitions: processes that disagree must not talk."""
    lines = []
    for union in (ToTokenizer, ToEngine, ToDetokenizer, ToFrontend, ToWorker, FromWorker):
        for kind in get_args(union) or (union,):
            lines.append(f"{kind.__name__} {get_type_hints(kind)}")
    lines.append(f"{get_type_hints(ReplyPlan)} {get_type_hints(Head)} {list(FinishReason)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
