"""Messages that cross a process border, grouped by receiver; a step is in `worker_messages.py`.

Messages are msgspec Structs on ZeroMQ or in shared memory. Bulk (bodies, token ids, response bytes)
is in a frame of its own beside the message. New fields go last, with a default.

Ids: the frontend draws a request id, which leads the response back. A request has
one or more *sequences* (`n`, several prompts), each with an id of its own:

    frontend (8 bits) | counter (40 bits) | sequence (16 bits, 0 in the request's own id)
"""

import enum
import hashlib
import math
from array import array
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any, Literal, Self

import msgspec

from headrace.model.output_formats import ThoughtFormat, ToolFormat

SEQUENCE_BITS = 16
COUNTER_BITS = 40
START_BITS = 8  # of these
MAX_STARTS = 1 << START_BITS
MAX_SEQUENCES = 1 << SEQUENCE_BITS
MAX_LOGPROBS = 20  # likeliest tokens reported in one place
MAX_BIASES = 2048  # of a sequence: logit_bias, bad_words and stop_token_ids together


def request_id(frontend: int, counter: int) -> int:
    """Return the id of a frontend's `counter`-th request."""
    return (frontend << COUNTER_BITS | counter % (1 << COUNTER_BITS)) << SEQUENCE_BITS


def request_of(sequence: int) -> int:
    """Return the id of the request a sequence belongs to."""
    return sequence >> SEQUENCE_BITS << SEQUENCE_BITS


def start_of(request: int) -> int:
    """Return by the how-manieth process in a frontend's seat a request was sent, within a byte."""
    return request >> (SEQUENCE_BITS + COUNTER_BITS - START_BITS) & (MAX_STARTS - 1)


def first_counter(start: int) -> int:
    """Return the first counter value of the `start`-th process in a frontend's seat.

    Responses to its predecessors are recognized by it and dropped.
    """
    return (start % MAX_STARTS) << (COUNTER_BITS - START_BITS)


def detokenizer_of(request: int, num_detokenizers: int) -> int:
    """Return which detokenizer process writes the answer to a request."""
    return (request >> SEQUENCE_BITS) % num_detokenizers


def share_key(name: bytes) -> int:
    """Return the key of an API key or a user, by which the engine is shared. Never 0."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") or 1


def frontend_of(id: int) -> int:
    """Return the index of the frontend that holds a request's connection."""
    return id >> (COUNTER_BITS + SEQUENCE_BITS)


class FinishReason(enum.IntEnum):
    """Why a sequence ended. Clients see only `STOP` and `LENGTH`."""

    STOP = 0  # a stop token, EOS included, or a stop string
    LENGTH = 1  # max_tokens or the context length
    ABORT = 2  # the client left
    REFUSED = 3  # the queue was full; nothing was computed


class Api(enum.StrEnum):
    """The API dialect of a request and its response."""

    CHAT = "chat"  # OpenAI's `/v1/chat/completions`
    COMPLETION = "completion"  # OpenAI's `/v1/completions`
    RESPONSES = "responses"  # OpenAI's `/v1/responses`
    MESSAGES = "messages"  # Anthropic's `/v1/messages`
    GENERATE = "generate"  # SGLang's `/generate`


NOT_FINISHED = 255  # in the place of a `FinishReason`, where there is none
MORE = 2  # in the place of `last`: the rest of this piece is in the next entries
ENDED = 1 << 31  # beside a number of tokens: the client has the sequence's end


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of all messages: positional, immutable, no reference cycles."""


# To a tokenizer process


class HttpRequest(Message, tag="http", frozen=True):
    """One HTTP request, read whole: frontend -> tokenizer. Frame: the body.

    After the death of a process that had it, it is sent again with a new id: late responses to the
    old id are dropped. The response is the same, and goes on where the client has it.
    """

    id: int
    method: str
    path: str
    received_at: float  # seconds since the epoch, when the head was read
    key: int = 0  # a hash of the API key; 0 is no key
    origin: int = 0  # the id it was first sent with, where this is not the first time,
    resumes: int = 0  # and the last
    num_delivered: dict[int, int] = {}  # by sequence: tokens whose text the client has, see `ENDED`
    is_suspect: bool = False  # is handled alone: a process has died that had it among others
    is_response_suspect: bool = False  # a detokenizer has died that had it, and was at no known one
    request_id: str = ""  # X-Request-Id of the response, for the log
    engine: int = -1  # that had it under its last id, and lives; -1 is that none is known
    # Ids it had before `resumes`, the newest first: nothing has come back since the last of these.
    earlier: list[int] = []

    @property
    def first_id(self) -> int:
        """The id it was first sent with."""
        return self.origin or self.id


ToTokenizer = HttpRequest


class Times(Message, frozen=True):
    """Times at which a request passed each process, CLOCK_MONOTONIC, ns. 0 is not yet, or never."""

    begun: int  # a tokenizer process took it,
    parsed: int = 0  # knew its text,
    tokenized: int = 0  # and its tokens
    queued: int = 0  # the engine took it,
    scheduled: int = 0  # began to compute it,
    first_token: int = 0  # and had a token
    rendered: int = 0  # which a detokenizer process turned into text
    model: int = 0  # whose request it is: its place among the server's


# To the engine


class Sampling(Message, frozen=True):
    """Sampling parameters of a sequence. The defaults are greedy and change nothing.

    In order: the grammar's mask, `logit_bias`, bans (`min_tokens`, `bad_words`), penalties,
    temperature, min_p, top_k, top_p (as in vLLM). Log probabilities are those of the model, before
    any of these.
    """

    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is all
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0  # of tokens generated so far
    frequency_penalty: float = 0.0  # the same, times how often
    repetition_penalty: float = 1.0  # of tokens generated or in the prompt
    logit_bias: dict[int, float] = {}
    bad_words: list[list[int]] = []  # token sequences that must not come about
    min_tokens: int = 0  # no stop token before
    logprobs: int | None = None  # how many likeliest tokens to report beside the chosen one
    prompt_logprobs: int | None = None  # the same for every prompt token but the first


class Tensor(Message, frozen=True):
    """A tensor in the arena, row-major. See `arena.py`."""

    offset: int  # of its bytes, from the arena's beginning
    generation: int  # of the place: it changes when the place is reused
    dtype: str  # little-endian, as numpy writes it without the sign: "f4", "i8", "u1"
    shape: list[int]

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * int(self.dtype[1:])


class Image(Message, frozen=True):
    """One image of a prompt: its pixels as the model's processor made them, and its place."""

    key: bytes  # 16, a hash of the source's bytes and of how they were prepared
    start: int  # its first token in the prompt that an embedding stands for
    num_tokens: int  # from there to the last one, markers between them included
    num_rows: int  # of these, that an embedding stands for: those that are the image token
    tensors: dict[str, Tensor]  # by the name that the tower has for them: pixel_values, ...
    grid: list[int] = []  # frames, rows and columns of its rows, for positions in three parts


class AdapterSource(Message, frozen=True):
    """An adapter (LoRA) by its name, and where its files are."""

    name: str
    path: str  # a folder of PEFT's, or a .gguf file
    digest: bytes  # of the files as they were when it was found, see `adapter_registry.py`


class ScriptedTokens(Message, frozen=True):
    """Tokens that a mock engine generates for a sequence, in place of words."""

    ids: bytes  # u32, at least one; the last one ends the text as a stop token does
    interval_ms: int = 0  # between two of them; a step takes at least as long


class GenerateRequest(Message, tag="generate", frozen=True):
    """One sequence to continue: tokenizer -> engine. Frame: prompt token ids, u32, at least one.

    The sequences of a request are sent in the order of their ids.
    """

    id: int
    detokenizer: int  # index of the process that turns its tokens into a response
    max_tokens: int  # 0 computes the prompt and ends; with the prompt it fits the context
    sampling: Sampling
    stop_token_ids: list[int]  # EOS among them unless it is ignored
    plan: bytes  # a `Plan`; the engine hands it on unread
    priority: int = 0  # the lower, the sooner, with `--scheduling-policy priority`
    key: int = 0  # as in `HttpRequest`: keys share the engine fairly
    salt: bytes = b""  # only prompts of the same salt share cached prefixes
    embeds: bool = False  # nothing is generated: the prompt's embedding is the answer
    times: Times | None = None
    second_text: int = 0  # of two texts in one, at which token the second begins
    grammar: bytes = b""  # llguidance's, checked: what is generated follows it; empty is anything
    resumes: int = 0  # the same sequence, under the id it had before; it goes on here
    images: list[Image] = []  # in the order of the prompt; it has a reference to each tensor
    allowed: bytes = b""  # only these tokens may be drawn: a bit each, lowest first; empty is all
    script: ScriptedTokens | None = None  # only to a mock engine
    request_id: str = ""  # as in `HttpRequest`
    adapter: AdapterSource | None = None  # it waits until workers have it; `salt` depends on it
    earlier: list[int] = []  # as in `HttpRequest`, of this sequence


class Abort(Message, tag="abort", frozen=True):
    """Stop all sequences of a request: frontend -> engine (the client left). May overtake it.

    It goes to the tokenizer process that may still have the body, too, by a link of its own.
    """

    request: int


class StopSequence(Message, tag="stop", frozen=True):
    """End one sequence: detokenizer -> engine, after a stop string. Nothing more is sent for it."""

    id: int


class RenewLeases(Message, tag="renew", frozen=True):
    """These requests are still open: frontend -> engine. Frame: all open ids, u64."""


class GeneratedTokens(Message, tag="said", frozen=True):
    """Tokens generated before an engine's death: detokenizer -> the next engine.

    Frame: token ids, u32, concatenated. A resumed sequence goes on after them.
    """

    ids: bytes  # u64, of sequences
    counts: bytes  # u32, of their tokens


ToEngine = GenerateRequest | Abort | StopSequence | RenewLeases | GeneratedTokens


# To a detokenizer process


class Parsing(Message, frozen=True):
    """Which parts of a response's text are reasoning or tool calls, and which of them are
    delivered."""

    tools: ToolFormat | None = None  # how tools are called, where there are some
    thoughts: ThoughtFormat | None = None
    begins_inside: bool = False  # the text begins with a thought, marked or not
    has_one_call: bool = False  # at most one is delivered
    hides_thoughts: bool = False
    string_parameters: dict[str, list[str]] = {}  # by tool, where calls do not say what is one
    custom_tools: list[str] = []  # those whose calls are free text, the one argument `input`


class ReportedSampling(Message, frozen=True):
    """Parameters of a request that its span has."""

    max_tokens: int
    temperature: float
    top_p: float
    n: int


class ResponsesForm(Message, tag="responses", frozen=True):
    """Fields of a `/v1/responses` response beside its text."""

    echo: bytes  # JSON, an object: the fields of the request that the response repeats


class GenerateForm(Message, tag="generate", frozen=True):
    """Options of a `/generate` response."""

    is_list: bool  # for several sequences, or a list of one prompt
    received_at: float  # as in `HttpRequest`
    ids: list[str]  # of the prompts; empty where the response's does for all
    num_each: int  # sequences of a prompt
    tells_token_text: bool  # with each log probability
    # Of each prompt, or of all: likeliest tokens reported with each one, and from which token of
    # the prompt on. None is no logprobs, and none of the prompt.
    num_logprobs: list[int | None]
    first_logprob: list[int | None]


class FaultKind(enum.StrEnum):
    """What goes wrong at the end of a scripted response."""

    ERROR = "error"  # a stream ends with an error event
    CUT = "cut"  # the connection closes in the middle of an event, or of the body
    JSON = "json"  # the last event, or the body, is not JSON
    NO_END = "no_end"  # a stream lacks its closing events, such as `[DONE]`
    CONTENT_TYPE = "content_type"  # the response claims to be HTML


class ResponseFault(Message, frozen=True):
    """A fault of a script in a response: tokenizer -> detokenizer, in its plan.

    The fields after `kind` are those of the error event.
    """

    kind: FaultKind
    status: int = 500
    message: str = ""
    type: str = ""
    code: str | None = None


class ResponsePlan(Message, tag="reply", frozen=True):
    """Rendering instructions for a response: tokenizer -> detokenizer, through the engine."""

    response_id: str  # "chatcmpl-…" or "cmpl-…"
    model: str
    created: int  # seconds since the epoch
    api: Api
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
    logprobs: int | None = None  # likeliest tokens reported with each one; None is no logprobs
    prompt_logprobs: int | None = None  # as many of the prompt's, in vLLM's form
    best_of: int = 1  # sequences per prompt, ...
    n: int = 1  # ... of which the likeliest are returned
    min_tokens: int = 0  # stop strings count after so many
    continuous_usage: bool = False  # every event of a stream has the usage so far
    spaces_between_special_tokens: bool = True  # where the tokenizer's decoder puts them
    return_token_ids: bool = False
    prompt_token_ids: bytes = b""  # u32, where token ids are returned
    parsing: Parsing | None = None  # None is words to the reader and nothing else
    form: ResponsesForm | GenerateForm | None = None  # what only this API has
    num_delivered: int | None = None  # as in `HttpRequest`; None: the client has nothing of it
    tokens_as_ids: bool = False  # log probabilities spell a token "token_id:123"
    function_call: bool = False  # a call is written as OpenAI's deprecated `function_call`
    is_suspect: bool = False  # as `is_response_suspect` of `HttpRequest`
    fault: ResponseFault | None = None  # only with a mock engine
    request_id: str = ""  # as in `HttpRequest`
    sampling: ReportedSampling | None = None  # with --otlp-traces-endpoint

    @property
    def chat(self) -> bool:
        """Whether it is one of OpenAI's chats."""
        return self.api is Api.CHAT


EmbeddingType = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]


class EmbeddingPlan(Message, tag="embedding", frozen=True):
    """Rendering instructions for an answer with embeddings."""

    model: str
    num_sequences: int
    num_prompt_tokens: int  # of this sequence
    index: int
    base64: bool  # little-endian f32, rather than a list of numbers
    dimensions: int | None = None  # only so many, and normalized again
    types: list[EmbeddingType] = []  # Cohere's, of all vectors, or Jina's one in place of `base64`
    cohere: Literal[0, 1, 2] = 0  # version of Cohere's API, whose response it is; 0 is OpenAI's
    response_id: str = ""  # Cohere's
    text: str = ""  # Cohere's, of this sequence
    normalizes: bool = False  # vectors have length 1


class SimilarityPlan(Message, tag="similarity", frozen=True):
    """Rendering instructions for similarity scores. Queries come before documents."""

    response_id: str  # "score-…" or "rerank-…"
    model: str
    created: int
    num_sequences: int
    num_prompt_tokens: int  # of this sequence
    index: int
    num_queries: int  # one, or one per document; 0 where each sequence is a query and a document
    ranks: bool  # `/v1/rerank`'s answer, rather than `/v1/score`'s
    top_n: int = 0  # documents to tell of; 0 is all
    document: str | None = None  # this sequence's text, where it is returned
    is_cohere: bool = False  # in the shape of Cohere's `/v2/rerank`


class AdapterPlan(Message, tag="adapter", frozen=True):
    """The response that an adapter is loaded, sent when its sequence has run."""

    body: str
    content_type: str


Plan = ResponsePlan | EmbeddingPlan | SimilarityPlan | AdapterPlan


class StepOutput(Message, tag="step", frozen=True):
    """New tokens of one engine step: engine -> detokenizer. Frame: their ids, u32, concatenated.

    The columns `ids`, `counts` and `finished` have one entry per sequence with news. A count is 0
    only where a sequence ended without a new token. The fields after them have an entry where
    there is something to say; those about prompts come with the sequence's first news.
    """

    started: dict[int, bytes]  # the `Plan` of each sequence seen for the first time
    ids: bytes  # u64
    counts: bytes  # u32
    finished: bytes  # u8: `FinishReason`, or `NOT_FINISHED`
    cached: dict[int, int] = {}  # prompt tokens found in the prefix cache
    logprobs: dict[int, bytes] = {}  # rows of `token_logprobs.py`, one per new token
    prompts: dict[int, bytes] = {}  # u32 ids, where prompt_logprobs are wanted
    prompt_logprobs: dict[int, bytes] = {}  # such rows, of every prompt token but the first
    embeddings: dict[int, bytes] = {}  # f32
    times: dict[int, Times] = {}  # with a sequence's first news
    # The `Plan` of each request that fails, for what it asks or for a process. Here it is aborted.
    failed: dict[int, bytes] = {}
    reasons: dict[int, str] = {}  # of requests in `failed`, fit for the client
    engine: int = 0  # the sender
    invalid: list[int] = []  # of these, those that asked for what cannot be done

    @classmethod
    def of(
        cls,
        started: dict[int, bytes],
        ids: Iterable[int],
        counts: Iterable[int],
        finished: Iterable[FinishReason | None],
        **fields: Any,
    ) -> Self:
        """Make a message of columns that are Python's."""
        ends = bytes(NOT_FINISHED if reason is None else reason for reason in finished)
        return cls(started, array("Q", ids).tobytes(), array("I", counts).tobytes(), ends, **fields)

    def rows(self) -> Iterator[tuple[int, int, FinishReason | None]]:
        """Yield the entries of the columns."""
        ids, counts = memoryview(self.ids).cast("Q"), memoryview(self.counts).cast("I")
        for id, count, end in zip(ids, counts, self.finished, strict=True):
            yield id, count, None if end == NOT_FINISHED else FinishReason(end)


ToDetokenizer = StepOutput


# To a frontend


class Head(Message, frozen=True):
    """Status line and content type of a response."""

    status: int
    content_type: str
    times: Times | None = None  # where the engine had a part in it
    headers: list[tuple[str, str]] = []  # more of them, names in lower case
    is_cut: bool = False  # the connection closes in place of the response's end


class ResponseFrames(Message, tag="frames", frozen=True):
    """Response bytes ready to write: detokenizer or tokenizer -> frontend, one per step.

    Frame: the bytes of all entries, concatenated. The columns have an entry per sequence with
    news, or several in order; `heads` has one by request where these are its first bytes.
    """

    heads: dict[int, Head]
    ids: bytes  # u64, of sequences, or of a request where no sequence is concerned
    lengths: bytes  # u32
    last: bytes  # u8: whether these bytes end the response, or `MORE`
    num_delivered: bytes = b""  # u32, as in `HttpRequest`; empty where nothing was generated
    # With --otlp-traces-endpoint: the `ResponseStats` of each request that begins or ends here.
    stats: dict[int, bytes] = {}
    engine: int = 0  # that computes the sequences

    @classmethod
    def of(
        cls,
        heads: dict[int, Head],
        ids: Iterable[int],
        lengths: Iterable[int],
        last: Iterable[int],
        num_delivered: Iterable[int] = (),
    ) -> Self:
        """Make a message of columns that are Python's."""
        columns = array("Q", ids).tobytes(), array("I", lengths).tobytes(), bytes(last)
        return cls(heads, *columns, array("I", num_delivered).tobytes())

    def split(self, data: bytes | memoryview) -> "Iterator[Entry]":
        """Yield each entry."""
        view, start = memoryview(data), 0
        heads = self.heads.copy()  # a request may have several entries
        ids, lengths = memoryview(self.ids).cast("Q"), memoryview(self.lengths).cast("I")
        counts = memoryview(self.num_delivered).cast("I") if self.num_delivered else repeat(0)
        for id, length, last, count in zip(ids, lengths, self.last, counts, strict=False):
            end = start + length
            head = heads.pop(id >> SEQUENCE_BITS << SEQUENCE_BITS, None) if heads else None
            yield id, head, view[start:end], last, count
            start = end


# A piece of a response: id, head, bytes, end, tokens. The id is the sequence's, or the request's
# where it is of no sequence. Only the first piece has a head. The end is whether the bytes are the
# last, or `MORE`. The tokens are those delivered with them, as in `HttpRequest`. In a piece of
# several entries the last entry has them.
Entry = tuple[int, Head | None, memoryview, int, int]


ToFrontend = ResponseFrames


# To the telemetry process


class ResponseStats(Message, frozen=True):
    """What was computed for a request so far: detokenizer -> telemetry, by way of a frontend.

    Times are as in `Times`.
    """

    num_prompt: int = 0  # tokens
    num_cached: int = 0  # of these, found in the prefix cache
    num_generated: int = 0  # tokens, those behind a stop string included
    num_sequences: int = 0
    finish_reasons: list[str] = []
    last_token: int = 0  # the detokenizer had it,
    rendered: int = 0  # and had written the last text
    sampling: ReportedSampling | None = None  # of a text
    response_id: str = ""  # where the response has one
    failed: bool = False  # the engine gave it up
    model: str = ""  # as the response names it


class RequestEnded(Message, tag="ended", frozen=True):
    """A response is complete, or is given up: frontend -> telemetry. Times are as in `Times`."""

    request_id: str
    method: str
    path: str
    status: int
    received_at: int  # the head was read
    ended_at: int
    num_received: int  # bytes of the body, as its head declares them
    num_sent: int  # bytes of the response's body, written
    is_complete: bool  # all of the response was written
    sent_at: int = 0  # the body went to a tokenizer
    begun_at: int = 0  # the response began
    times: Times | None = None
    stats: bytes = b""  # a `ResponseStats`, as it came
    traceparent: str = ""  # headers of the request: https://www.w3.org/TR/trace-context/
    tracestate: str = ""


ToTelemetry = RequestEnded
