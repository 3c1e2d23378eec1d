"""The state of one sequence while the engine works on it."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.engine_proc.sequence.grammar_matcher import GrammarMatcher
from headrace.engine_proc.sequence.image_placeholder import ImagePlaceholder, first_unready
from headrace.engine_proc.sequence.mrope import MRopePositions
from headrace.engine_proc.sequence.pooled_adapter import PooledAdapter
from headrace.ipc.messages import FinishReason, GenerateRequest, Sampling

PLAIN = Sampling()
NO_STATE = -1
# The fields of `Sampling` that need or report more than the last token.
MORE = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "bad_words",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
)
# That for which the last token has to be known before the row is made that draws the next.
BACK = ("bad_words",)


@dataclass(eq=False, slots=True)
class Sequence:
    """A sequence's tokens, and its pages in the KV cache.

    Prefill and decode are one thing: `num_computed` catches up with `len(tokens)`, then the next
    token is sampled. While the step that samples it is in flight, the token is expected, and the
    step after it can be scheduled.
    """

    request: GenerateRequest
    tokens: "array[int]"  # i32: the prompt, then what was generated
    num_prompt: int
    is_plain: bool  # drawn from the last logits alone, and nothing but the token is reported
    turn: int = 0  # unique, the lowest runs first: see `make_turn`
    queued_at: int = 0  # the step before which it began to wait
    looks_back: bool = False  # what its rows ban depends on its last token; see `BACK`
    num_computed: int = 0  # what is being computed included
    num_expected: int = 0  # its tokens, and those that are being sampled
    num_computable: int = 0  # the most tokens it can have, less the last: that is never input
    row: int = -1  # of the last step that samples its next token; kept by `build_step`
    has_ended: bool = False  # results of its steps in flight are ignored
    pages: "array[int]" = field(default_factory=lambda: array("i"))  # in position order
    state: int = NO_STATE  # the slot of its state behind `num_computed` tokens
    num_uncovered: int = 0  # accepted drafts that its state does not cover: they are pending
    branch: int = 0  # the border of pages up to which others have computed the same tokens
    newest_checkpoint: bytes = b""  # the digest of the one that its next one takes the place of
    digests: list[bytes] = field(default_factory=list)  # of its full pages, see `PagePool`
    num_cached: int = 0  # prompt tokens found in the prefix cache
    prompt_logprobs: bytearray = field(default_factory=bytearray)  # until they are reported
    drafts: "array[int]" = field(default_factory=lambda: array("i"))  # by a draft model,
    draft_chances: list[float] = field(default_factory=list)  # with these probabilities,
    first_draft: int = 0  # from this position on; see `draft_model.py`, as for the next
    num_drafted: int = 0  # its tokens that the draft model has computed
    may_be_drafted: bool = True  # no worker died while it drafted for this sequence
    sampling_row: bytearray = field(default_factory=bytearray)  # kept by `SamplingMetadata`
    queued_ns: int = 0  # when it came, CLOCK_MONOTONIC
    scheduled_ns: int = 0  # when it was first part of a step
    first_token_ns: int = 0  # kept by `SequenceStats`, as the next
    last_token_ns: int = 0
    num_preemptions: int = 0
    has_started: bool = False  # its plan has gone to the detokenizer
    matcher: GrammarMatcher | None = None  # where it has a grammar, see `MatcherQueue`
    images: list[ImagePlaceholder] = field(default_factory=list)  # see `EncoderQueue`
    num_prefix: int = 0  # its first tokens that all see each other: its prompt in a prefix LM
    rope: MRopePositions | None = None  # where an image makes them others than positions
    is_fetching: bool = False  # it waits for pages, see `PageFetcher`
    is_copying: bool = False  # it waits for pages, see `HostTier`
    seeks_pages: bool = False  # they were lost, or there was no room for them
    is_masked: bool = False  # only some tokens may be drawn
    has_no_token: bool = False  # none that its grammar and its request both allow
    adapter: PooledAdapter | None = None  # kept by the scheduler

    @classmethod
    def of(
        cls, request: GenerateRequest, prompt: bytes | memoryview, queued_ns: int = 0
    ) -> "Sequence":
        """Start with a prompt of u32 token ids."""
        tokens = array("i")
        tokens.frombytes(prompt)
        is_masked = bool(request.grammar or request.allowed)
        is_plain = not (request.embeds or is_masked or asks(request.sampling, MORE))
        return cls(
            request,
            tokens,
            len(tokens),
            is_plain,
            is_masked=is_masked,
            num_expected=len(tokens),
            looks_back=asks(request.sampling, BACK),
            num_computable=len(tokens) + max(request.max_tokens - 1, 0),
            queued_ns=queued_ns,
        )

    def take_after(self, old: "Sequence") -> None:
        """Continue the history of the same sequence."""
        self.num_cached = old.num_cached
        self.queued_ns, self.scheduled_ns = old.queued_ns, old.scheduled_ns
        self.first_token_ns, self.last_token_ns = old.first_token_ns, old.last_token_ns
        self.num_preemptions = old.num_preemptions

    @property
    def id(self) -> int:
        """The id its messages carry."""
        return self.request.id

    @property
    def num_generated(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - self.num_prompt

    @property
    def generated(self) -> "array[int]":
        """Tokens generated so far."""
        return self.tokens[self.num_prompt :]

    @property
    def is_stuck(self) -> bool:
        """Whether no token may be drawn, or its grammar cannot be followed any further."""
        if self.has_no_token:
            return True
        return bool(self.request.grammar) and (self.matcher is None or self.matcher.is_stuck)

    @property
    def generates(self) -> bool:
        """Whether tokens follow the prompt. An embedding or a scored prompt ends with it."""
        return self.request.max_tokens > 0 and not self.request.embeds

    @property
    def num_pending(self) -> int:
        """Tokens that no step computes yet; 0 while its last one is being sampled."""
        return self.num_expected - self.num_computed

    def finish_reason(self, token: int) -> FinishReason | None:
        """Return why it ends with `token`, its newest, or None."""
        if token in self.request.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_generated >= self.request.max_tokens else None

    def drop_drafts(self) -> None:
        """Forget its drafts, and what the draft model has computed."""
        self.drafts, self.num_drafted = array("i"), 0
        self.draft_chances.clear()

    @property
    def is_prefilling(self) -> bool:
        """Whether more is pending than its newest token and accepted drafts."""
        return self.num_pending > 1 + self.num_uncovered

    @property
    def computable_end(self) -> int:
        """The first token that cannot be computed yet, for want of an image's embedding."""
        if self.num_computed < self.num_prefix and self.awaits_image:
            return self.num_computed
        return first_unready(self.images, self.num_computed)

    @property
    def is_blocked(self) -> bool:
        """Whether no token can be computed yet: it waits for an image, an adapter or pages."""
        if self.is_fetching or self.is_copying:
            return True
        if self.adapter is not None and not self.adapter.is_loaded:
            return True
        return bool(self.images) and self.computable_end <= self.num_computed

    @property
    def may_begin(self) -> bool:
        """Whether it waits for nothing but a turn."""
        return not self.is_blocked and (self.adapter is None or self.adapter.is_open)

    @property
    def awaits_image(self) -> bool:
        """Whether one of its images has not been encoded."""
        return not all(placed.is_ready for placed in self.images)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether the log probabilities of its prompt are requested and not yet sent."""
        return self.request.sampling.prompt_logprobs is not None and not self.has_started


def asks(sampling: Sampling, names: Iterable[str]) -> bool:
    """Whether one of these fields differs from its default."""
    return any(getattr(sampling, name) != getattr(PLAIN, name) for name in names)
