"""Messages between the engine and its workers, in shared memory: steps, results, images, pages."""

import struct
from enum import StrEnum
from itertools import zip_longest
from typing import Annotated, NamedTuple, get_type_hints

import msgspec
from msgspec import field

from headrace.ipc.messages import Message, Tensor

ITEM_BYTES = 4  # of the columns of a `Step`
SLOTS_PER_SEQUENCE = 2  # a step reads a state from one slot and writes it to another, ...
SLOTS_LOOKING_AHEAD = 3  # ... and so does the next one, sent before that has ended


class Step(Message, tag="step", frozen=True, kw_only=True):
    """The batch of one step: engine -> every worker. Arrays are little-endian.

    The first five fields are those of `executor.Batch`. `rows` has a `SAMPLING_ROW` for each of
    `logit_rows`, which points into the biases. With penalties it names a slot of the worker, which
    has the tokens that they look at. A step brings what is new of them, before its rows are drawn.
    """

    token_ids: bytes  # i32
    positions: bytes  # i32
    sequences: bytes  # i32
    page_table: bytes  # i32, the pages of each sequence, one after the other
    logit_rows: bytes  # i32
    rows: bytes
    history: bytes = b""  # i32, for slots; -1 - r is what row r of the step before draws
    bias_tokens: bytes = b""  # i32
    bias: bytes = b""  # f32, added to those tokens' logits; minus infinity bans
    pooled_rows: bytes = b""  # i32, the last token of each sequence whose embedding is wanted
    token_types: bytes = b""  # i32, 1 in the second of two texts; empty where no sequence has two
    masked_rows: bytes = b""  # i32, the logit rows in which a grammar allows some tokens only
    # Of images, by token; empty where no token of the step needs it.
    embed_rows: bytes = b""  # i32, the row of the embedding area it comes in as; -1 is none
    rope_positions: bytes = b""  # i32, three of each: time, height, width
    last_seen: bytes = b""  # i32, the last position it sees, which is in the step, too
    # i32, by token: the logit row of the step before this one whose drawn token takes its place.
    # -1 is none; empty where all tokens are known. So a step can be sent while the last one runs.
    token_sources: bytes = b""
    # i32, by sequence: the slot that the state is read from, -1 for none, and the one it is written
    # to. Empty in models without states. A step may be run again: it reads no slot that it writes.
    state_in: bytes = b""
    state_out: bytes = b""
    # i32, by sequence: the token before which the written state ends. From there on are drafts,
    # and tokens that a later step computes again. Empty: it covers all tokens.
    state_ends: bytes = b""
    adapters: bytes = b""  # i32, by sequence: the slot of its adapter, -1 for none; empty: none
    is_draft: bool = False  # what drafts computes it, in its own part of pages with these numbers
    page_counts: bytes = b""  # i32, by sequence: how many pages it has; empty: all have as many
    # i32, three of each sequence with penalties that has new tokens: its slot, where in it they
    # begin, and how many of `history` they are. What the slot has from there on goes.
    history_updates: bytes = b""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that it computes."""
        return len(self.token_ids) // ITEM_BYTES


class Masks(Message, tag="masks", frozen=True):
    """The masks of the last step's `masked_rows` are in shared memory: engine -> every worker.

    They are made while the step is computed. See `grammar_bitmask.py`.
    """


class Resume(Message, tag="resume", frozen=True):
    """A step has failed; those sent after this are to be run again: engine -> every worker."""


class Rest(Message, tag="rest", frozen=True):
    """Give back the memory of steps until the next one: engine -> every worker, without a step."""


class LoadAdapter(Message, tag="load", frozen=True):
    """Load an adapter into a slot, in place of what is there: engine -> every worker.

    No step in flight uses the slot. Steps go on meanwhile.
    """

    slot: int
    path: str
    digest: bytes  # as in `AdapterSource`


class AdapterLoaded(Message, tag="adapter", frozen=True):
    """A slot has its adapter, for all steps sent from here on: every worker -> engine."""

    slot: int
    why_not: str = ""  # it could not be loaded, and why, fit for the client


class CopyPages(Message, tag="copy_pages", frozen=True):
    """Pages and states to copy between a GPU and its host tier: engine -> every worker.

    They are full pages, and states that no step writes. Workers copy beside the steps.
    `PagesCopied` answers. Before that no step writes to what is read, or uses what is written.
    """

    to_host: bool  # or else to the GPU
    pages: bytes  # i32, of the GPU,
    host_pages: bytes  # i32, and those of the host tier: one for each
    slots: bytes = b""  # i32, of states of the GPU,
    host_slots: bytes = b""  # i32, and those of the host tier


class PagesCopied(Message, tag="pages_copied", frozen=True):
    """The oldest `CopyPages` without an answer is done: every worker -> engine."""

    seconds: float  # that it took


U64 = Annotated[int, "Q"]
I32 = Annotated[int, "i"]
F32 = Annotated[float, "f"]


class SamplingRow(NamedTuple):
    """How one row is sampled: the one table of `SAMPLING_ROW`, in order of its fields.

    Noise is a function of seed and position, so batch mates never change a result.
    `csrc/sampling/sampler_row.h` has the same struct; a test compares both.
    """

    seed: U64 = 0
    position: U64 = 0  # the new token's
    temperature: F32 = 0.0
    top_p: F32 = 1.0
    min_p: F32 = 0.0
    presence_penalty: F32 = 0.0
    frequency_penalty: F32 = 0.0
    repetition_penalty: F32 = 1.0
    top_k: I32 = 0
    num_logprobs: I32 = -1  # likeliest tokens to report; -1 is no logprobs
    target: I32 = -1  # the token to report instead of sampling; -1 is none
    history_slot: I32 = 0  # whose first `num_history` tokens penalties look at
    num_prompt: I32 = 0  # so many tokens of the history, its first, are the prompt's
    num_history: I32 = 0
    bias_start: I32 = 0
    num_bias: I32 = 0


# The codes of `struct` for the fields of a row, by name.
SAMPLING_CODES: dict[str, str] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(SamplingRow, include_extras=True).items()
}
# Padded as by a C compiler: whole words, whichever fields there are.
SAMPLING_ROW = struct.Struct("@" + "".join(SAMPLING_CODES.values()) + "0Q")


def sampling_offset(name: str) -> int:
    """Return where a field of a `SAMPLING_ROW` begins, in bytes."""
    place = SamplingRow._fields.index(name)
    return struct.calcsize("@" + "".join(SAMPLING_CODES.values())[:place])


class StepResult(Message, tag="result", frozen=True):
    """The result of a step: worker 0 -> engine.

    `logprobs` has an entry for each row that reports them: f32 logprob and i32 rank of the row's
    token. Then follow num_logprobs pairs of i32 token and f32 logprob, best first.
    """

    token_ids: bytes  # i32, one per logit row; a target's row has the target
    logprobs: bytes = b""
    embeddings: bytes = b""  # f32, one vector per pooled row


class StepFailed(Message, tag="failed", frozen=True):
    """There was no memory for a step: worker -> engine, for it and all that are sent after it.

    Nothing of it counts. It succeeds on all workers or on none: one failure fails it on all.
    """

    why: str


class WorkerReady(Message, tag="ready", frozen=True):
    """The worker has loaded its weights and mapped its pages: worker -> engine, once."""

    num_pages: int
    page_tokens: int
    whole_prompts: bool = False  # an encoder: all tokens of a text see each other, in one step
    looks_ahead: bool = False  # a step had better be sent while the one before it is computed
    num_states: int = 0  # slots for the states of sequences; 0 in models without states
    cache_id: bytes = b""  # of its own pages, which outlive it: new whenever they are cleared
    page_bytes: int = 0  # of its share of a page, where pages outlive it,
    state_bytes: int = 0  # and of a state,
    # Pages of a GPU's host tier. These outlive the worker, and not its own; 0 is no such tier.
    num_host_pages: int = 0
    num_host_states: int = 0  # likewise
    numerics: str = ""  # of a GPU with a host tier: what decides about bits beside model and flags
    eagle_bytes: int = 0  # as `page_bytes`, of EAGLE-3's layer, whose pages have hidden states
    hidden_size: int = 0  # numbers of a token that go from a stage to the next; 0 without stages
    gpu: str = ""  # its name, as the driver has it; none on CPUs


ToWorker = Step | Masks | Resume | LoadAdapter | CopyPages | Rest
FromWorker = StepResult | StepFailed | WorkerReady | AdapterLoaded | PagesCopied


# Between the engine and its vision worker, in shared memory


class Encode(Message, tag="encode", frozen=True):
    """Images to encode in one call: engine -> vision worker, which answers before the next."""

    images: list[dict[str, Tensor]]
    rows: list[bytes]  # i32, of the embedding area: where the rows of each are to be
    keys: list[bytes] = field(default_factory=list)  # of the images
    fingerprint: str = ""  # of the KV store's files; without one no embedding is kept there


class Encoded(Message, tag="encoded", frozen=True):
    """The embeddings of an `Encode` are in the area: vision worker -> engine.

    `gone` and `failed` tell of those that are not, by their places in `Encode.images`.
    """

    gone: list[int] = field(default_factory=list)  # the tensors are not in the arena any more
    failed: dict[int, str] = field(default_factory=dict)  # the tower could not take them, and why
    num_stored: int = 0  # embeddings that the KV store had


class TowerReady(Message, tag="tower", frozen=True):
    """A vision worker has loaded its tower: vision worker -> engine, once."""

    max_numbers: int  # of pixels that the images of an `Encode` may have, unless it is one image
    gpu_bytes: int = 0  # of the first GPU, that it has and never exceeds; 0 is that it has no GPU


ToVision = Encode
FromVision = Encoded | TowerReady


# Between the engine and its KV store, in shared memory


class RecordKind(StrEnum):
    """What a record of the KV store is of."""

    PAGES = "pages"
    STATES = "states"


class CacheLayout(msgspec.Struct, frozen=True):
    """How many pages and states there are, and the bytes of each worker's share of one."""

    num_pages: int
    num_states: int
    page_bytes: list[int]
    state_bytes: list[int]
    eagle_bytes: list[int] = field(default_factory=list)  # of a page of EAGLE-3's layer, if any

    def count(self, kind: RecordKind) -> int:
        """Return how many records of a kind there are."""
        return self.num_pages if kind is RecordKind.PAGES else self.num_states

    def share_bytes(self, kind: RecordKind) -> list[int]:
        """Return the bytes of each worker's share of a record."""
        if kind is RecordKind.STATES:
            return self.state_bytes
        return [*map(sum, zip_longest(self.page_bytes, self.eagle_bytes, fillvalue=0))]

    def record_bytes(self, kind: RecordKind) -> int:
        """Return the bytes of a record."""
        return sum(self.share_bytes(kind))


class OpenStore(Message, tag="open_store", frozen=True):
    """The workers are ready: engine -> KV store, once. `StoreReady` answers."""

    layout: CacheLayout
    # Of GPUs, as in `WorkerReady`. The layout is then that of their host tier, which has the bytes
    # of --kv-store-bytes: the store itself has no tier in memory.
    numerics: str = ""


class Lookup(Message, tag="lookup", frozen=True):
    """Whether records are in the store: engine -> KV store. `LookupResult` answers."""

    digests: bytes


class FetchRecords(Message, tag="fetch_records", frozen=True):
    """Records to copy into the workers' memory: engine -> KV store.

    `FetchedRecords` answers. The engine has allocated the places, and does not use them before.
    """

    kind: RecordKind
    digests: bytes
    places: bytes  # i32: pages, or state slots


class Drain(Message, tag="drain", frozen=True):
    """All that is cached is to be stored, for a while: engine -> KV store. `Drained` answers.

    With a new number all means what is cached now; with the same, the rest of that.
    """

    number: int
    seconds: float  # at least one record is stored


class StoreReady(Message, tag="store_ready", frozen=True):
    """The store can be asked: KV store -> engine, once."""

    fingerprint: str  # of its files


class LookupResult(Message, tag="found", frozen=True):
    """Which records of a `Lookup` there are: KV store -> engine. A byte per digest, 1 or 0."""

    pages: bytes
    states: bytes


class FetchedRecords(Message, tag="fetched_records", frozen=True):
    """Which places have their records now: KV store -> engine. A byte per digest, 1 or 0."""

    is_there: bytes
    seconds: float
    cpu_s: float  # of the store's core


class Drained(Message, tag="drained", frozen=True):
    """What was stored of a `Drain`: KV store -> engine."""

    number: int  # of the `Drain`
    is_all: bool


ToStore = OpenStore | Lookup | FetchRecords | Drain
FromStore = StoreReady | LookupResult | FetchedRecords | Drained
