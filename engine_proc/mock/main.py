"""Mock process: stands in for the engine, with a timing model in place of weights;
In: ToEngine (tokenizer_proc, frontend, detokenizer_proc).  Out: ToDetokenizer."""

# It stands in for the engine when the processes around it are sized. Messages and limits are the
# same, first come, first served; steps take as long as in a profile. Texts are words of the
# vocabulary, or of `allowed_token_ids`, until `max_tokens`, or what a script says. It has no memory
# to run out of, no prefix cache, no sampling and therefore no log probabilities.

import re
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, assert_never

import msgspec
import numpy as np

from headrace.board.backlog import engine_backlog
from headrace.board.board import Slot, Timing
from headrace.board.fields import CommonField, EngineField
from headrace.config.process_configs import EngineConfig
from headrace.engine_proc.gateway.links import detokenizer_links, listen
from headrace.engine_proc.mock.profile import Profile, read_profile
from headrace.engine_proc.mock.rows import Rows, Words
from headrace.engine_proc.request_io.detokenizer_links import DetokenizerLinks
from headrace.engine_proc.request_io.intake import Intake, IntakeDecision
from headrace.engine_proc.request_io.prefill_rate import PrefillRate
from headrace.engine_proc.request_io.sequence_stats import TokenRate, begin, close
from headrace.engine_proc.request_io.turn import EngineInbox, messages_of_turn
from headrace.ipc.arena import Arena
from headrace.ipc.messages import (
    NOT_FINISHED,
    Abort,
    FinishReason,
    GeneratedTokens,
    GenerateRequest,
    RenewLeases,
    StepOutput,
    StopSequence,
    Times,
    ToEngine,
    request_of,
)
from headrace.ipc.sockets import Frame
from headrace.model.tokenizer_json import read_tokenizer_json
from headrace.runtime.process import Context

IDLE_MS = 500
NUM_WORDS = 61  # in a text before it repeats
WORD = re.compile(r"[Ġ▁ ][a-z]{3,}")  # as byte-level BPE and SentencePiece write a word
PAGE_TOKENS = 16  # in which the board counts
ONE, NONE = array("I", [1]).tobytes(), array("I", [0]).tobytes()
UNFINISHED = bytes([NOT_FINISHED])


def main(config: EngineConfig, context: Context) -> NoReturn:
    """Run until SIGTERM."""
    inbox = listen(config, context)
    detokenizers = detokenizer_links(config, context, inbox)
    engine_backlog(context.board, context.index).settle()
    profile = read_profile(config.mock_profile)
    words = read_words(Path(config.execution.model_path))
    frontends = list(context.board.of("frontend"))
    engine = MockEngine(config, profile, words, detokenizers, context.slot, frontends)
    context.ready()
    try:
        while True:
            context.slot.beat()
            engine.receive(inbox)
            engine.abort_expired()
            if engine.has_work:
                engine.step()
    finally:
        inbox.close()


def read_words(model: Path) -> Words:
    """Return ids of tokens that are words: the first in the vocabulary, which are short ones."""

    class Model(msgspec.Struct):
        vocab: dict[str, int] | list[tuple[str, float]]  # a list in Unigram tokenizers

    class Tokenizer(msgspec.Struct):
        model: Model

    vocab = msgspec.json.decode(read_tokenizer_json(model), type=Tokenizer).model.vocab
    if isinstance(vocab, list):
        vocab = {piece: id for id, (piece, _) in enumerate(vocab)}
    words = sorted(id for piece, id in vocab.items() if WORD.fullmatch(piece))
    return np.array(words[:NUM_WORDS] or [min(vocab.values())], np.uint32)


def allowed_words(request: GenerateRequest, words: Words) -> Words:
    """Return the words of a text: the allowed ones, or else the first allowed tokens.

    A token that would end the text is said only where no other one is allowed.
    """
    bits = np.unpackbits(np.frombuffer(request.allowed, np.uint8), bitorder="little")
    ids = np.flatnonzero(bits).astype(np.uint32)
    ongoing = np.setdiff1d(ids, np.array(request.stop_token_ids, np.uint32))
    some = ongoing if len(ongoing) else ids
    known = words[np.isin(words, some)]
    return known if len(known) else some[:NUM_WORDS]


def unit_vector(size: int) -> bytes:
    """Return f32 numbers of length 1, no two of them alike."""
    vector = np.sin(np.arange(1, size + 1, dtype=np.float64))
    data: bytes = (vector / np.linalg.norm(vector)).astype(np.float32).tobytes()
    return data


@dataclass(eq=False, slots=True)
class MockSequence:
    """One sequence: waiting, then in `Rows`."""

    request: GenerateRequest
    num_prompt: int
    num_pending: int  # prompt tokens still to be computed
    queued: int = 0  # when it came; CLOCK_MONOTONIC, ns, as the next
    scheduled: int = 0  # when its first step began
    first_token: int = 0  # when it had one
    last_step: int = 0  # in which it ends by itself, once it is in `Rows`
    num_tokens: int = field(init=False)  # that follow the prompt, unless it is ended early
    end: FinishReason = field(init=False)  # why it ends by itself

    @property
    def generates(self) -> bool:
        """Whether tokens follow the prompt."""
        return self.request.max_tokens > 0 and not self.request.embeds

    def __post_init__(self) -> None:
        request = self.request
        self.num_tokens = request.max_tokens
        self.end = FinishReason.STOP if request.embeds else FinishReason.LENGTH
        if request.script is not None:
            num_scripted = len(request.script.ids) // 4
            if self.generates and num_scripted <= request.max_tokens:
                self.num_tokens, self.end = num_scripted, FinishReason.STOP


def times_of(sequence: MockSequence) -> Times:
    """Return when a sequence passed what, its first token being there."""
    assert sequence.request.times is not None
    return msgspec.structs.replace(
        sequence.request.times,
        queued=sequence.queued,
        scheduled=sequence.scheduled,
        first_token=sequence.first_token,
    )


class MockEngine:
    """The mock engine's state between steps."""

    def __init__(
        self,
        config: EngineConfig,
        profile: Profile,
        words: Words,
        detokenizers: DetokenizerLinks,
        slot: Slot,
        frontends: Iterable[Slot] = (),
    ) -> None:
        self._frontends = list(frontends)
        self._profile = profile
        self._detokenizers = detokenizers
        self._slot = slot
        self._slot[EngineField.PAGE_TOKENS] = PAGE_TOKENS
        self._rate = TokenRate(slot)
        self._prefill_rate = PrefillRate(slot, time.monotonic)
        execution = config.execution
        self._max_num_seqs = execution.max_num_seqs
        self._max_num_queued = config.max_num_queued
        self._max_tokens = profile.max_num_batched_tokens or execution.max_num_batched_tokens
        self._num_pages = execution.max_num_seqs * -(-execution.max_model_len // PAGE_TOKENS)
        self._slot[EngineField.PAGES_TOTAL] = self._num_pages
        self._vector = unit_vector(config.embedding_size or 1)
        self._sequences: dict[int, MockSequence] = {}
        self._requests: dict[int, list[int]] = {}  # the sequences of each
        self._waiting: OrderedDict[int, MockSequence] = OrderedDict()
        self._words = words
        self._rows = [Rows(execution.max_num_seqs, words) for _ in range(len(detokenizers))]
        self._intake = Intake()
        self._arena = None
        if config.arena_fd is not None:
            self._arena = Arena(config.arena_fd, config.num_arena_regions)
        self._ends: dict[int, dict[int, MockSequence]] = {}  # by step, then by id
        self._step = 0
        self._intervals_ns: dict[int, int] = {}  # of generating sequences whose script has one
        self._num_waiting_tokens = 0
        self._num_generating = 0  # sequences
        self._num_context = 0  # tokens of generating sequences, before the next step
        self._stepped = 0  # when the last step ended, CLOCK_MONOTONIC, ns
        self._free_at = 0.0  # when the last step ended, or work came after none
        self._update_board()

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything, and no script has it wait."""
        return bool(self._sequences) and not (self._intervals_ns and self.pause_ms)

    @property
    def pause_ms(self) -> int:
        """How long scripts have the next step wait."""
        due = self._stepped + max(self._intervals_ns.values(), default=0)
        return max(0, -(-(due - time.monotonic_ns()) // 1_000_000))

    @property
    def _idle_ms(self) -> int:
        """How long to wait for a message where no step is due."""
        return min(IDLE_MS, self.pause_ms) if self._sequences else IDLE_MS

    def receive(self, inbox: EngineInbox) -> None:
        """Handle messages that have arrived, up to a limit; others wait for the next turn.

        Wait for one only if there is no other work.
        """
        is_idle = not self.has_work
        if is_idle:
            self._detokenizers.flush()
            self._note_busy()
        received = inbox.receive(self._idle_ms if is_idle else 0)
        if received is None:
            return
        for message, bulk in messages_of_turn(inbox, received):
            self.take(message, bulk)
        if is_idle:
            self._free_at = time.monotonic()
        self._update_board()

    def take(self, message: ToEngine, bulk: Frame) -> None:
        """Handle one message; `bulk` is a prompt's token ids."""
        match message:
            case GenerateRequest():
                self._slot[EngineField.IS_BUSY] = 1  # before it counts as taken
                self._slot.add(EngineField.TAKEN_TOKENS, len(bulk) // 4)
                self._add(message, len(bulk) // 4)
            case Abort(request):
                self._abort(request)
            case RenewLeases():
                self._intake.renew(memoryview(bulk).cast("B").cast("Q"), time.monotonic())
            case StopSequence(id):
                stopped = self._sequences.get(id)
                if stopped is not None:
                    if stopped.first_token:
                        self._close(stopped, FinishReason.STOP, self._stepped)
                    self._forget(stopped)
                    self._slot.add(EngineField.FINISHED)
            case GeneratedTokens():  # what is resumed begins anew
                pass
            case _:
                assert_never(message)

    def _release(self, request: GenerateRequest) -> None:
        """Release the images of a sequence."""
        for image in request.images:
            for tensor in image.tensors.values():
                assert self._arena is not None
                self._arena.release(tensor)

    def _abort(self, request: int) -> None:
        self._intake.drop(request)
        ended = [self._sequences[id] for id in self._requests.get(request, ())]
        for sequence in ended:
            self._forget(sequence)
        self._slot.add(EngineField.ABORTED, len(ended))
        for sequence in ended[:1]:  # one is enough
            self._end(sequence.request, FinishReason.ABORT)

    def abort_expired(self) -> None:
        """Abort requests whose leases have expired."""
        starts = [slot[CommonField.STARTS] for slot in self._frontends]
        for request in self._intake.expired(self._requests, time.monotonic(), starts):
            self._slot.add(EngineField.LAPSED)
            self._abort(request)

    def _add(self, request: GenerateRequest, num_prompt: int) -> None:
        is_full = len(self._waiting) >= self._max_num_queued and not request.resumes
        match self._intake.judge(request.id, is_full):
            case IntakeDecision.TAKEN:
                if request.resumes:  # from the beginning: that takes it no time
                    for before in (request.resumes, *request.earlier):
                        self._abort(request_of(before))
                self._wait_in_line(request, num_prompt)
            case IntakeDecision.REFUSED:
                self._release(request)
                self._slot.add(EngineField.QUEUE_REFUSALS)
                self._end(request, FinishReason.REFUSED)
            case IntakeDecision.DROPPED:
                self._release(request)

    def _wait_in_line(self, request: GenerateRequest, num_prompt: int) -> None:
        sequence = MockSequence(request, num_prompt, num_prompt, time.monotonic_ns())
        self._num_waiting_tokens += num_prompt
        self._sequences[request.id] = self._waiting[request.id] = sequence
        self._requests.setdefault(request_of(request.id), []).append(request.id)

    def _end(self, request: GenerateRequest, why: FinishReason) -> None:
        """Report an end without tokens to the detokenizer."""
        output = StepOutput.of({}, [request.id], [0], [why])
        self._detokenizers.hold(request.detokenizer, output, b"")

    def _forget(self, sequence: MockSequence) -> None:
        """Remove a sequence, waiting or generating."""
        id = sequence.request.id
        del self._sequences[id]
        if self._waiting.pop(id, None) is not None:
            self._num_waiting_tokens -= sequence.num_pending
            self._release(sequence.request)
        else:
            ends = self._ends[sequence.last_step]
            del ends[id]
            if not ends:
                del self._ends[sequence.last_step]
            if sequence.generates:
                self._num_generating -= 1
                self._rows[sequence.request.detokenizer].remove(id)
                num_left = sequence.last_step - self._step
                self._num_context -= sequence.num_prompt + sequence.num_tokens - num_left
                self._intervals_ns.pop(id, None)
        siblings = self._requests[request_of(id)]
        siblings.remove(id)
        if not siblings:
            del self._requests[request_of(id)]

    def step(self) -> None:
        """Compute for the profile's step time and send the results."""
        num_generating = self._num_generating
        begun, num_prompt_tokens = self._compute_prompts(self._max_tokens - num_generating)
        num_tokens = num_generating + num_prompt_tokens
        num_sequences = num_generating + len(begun)
        seconds = self._profile.seconds(num_tokens, num_sequences, self._num_context)
        self._wait(seconds)
        if num_prompt_tokens:
            self._prefill_rate.observe(num_tokens, seconds)
        self._step += 1
        now = time.monotonic_ns()
        if num_generating:
            self._slot.histogram(Timing.BETWEEN).observe(now - self._stepped, num_generating)
        self._stepped = now
        for sequence in begun:
            self._begin(sequence)
        self._num_context += self._num_generating
        ended = list(self._ends.get(self._step, {}).values())
        for index in range(len(self._detokenizers)):
            self._publish(index, begun, ended)
        self._detokenizers.send_ready()
        self._slot.histogram(Timing.STEP).observe(num_tokens)
        self._slot.add(EngineField.COMPUTED_TOKENS, num_tokens)
        self._slot.add(EngineField.GENERATED_TOKENS, self._num_generating)
        self._rate.observe(now)
        self._slot.add(EngineField.FINISHED, len(ended))
        for sequence in ended:
            self._close(sequence, sequence.end, now)
            self._forget(sequence)
        self._update_board()

    def _compute_prompts(self, budget: int) -> tuple[list[MockSequence], int]:
        """Compute prompts in order; return those that are complete, and how many tokens it took."""
        begun: list[MockSequence] = []
        rest = budget
        room = self._max_num_seqs - self._num_generating
        while rest > 0 and self._waiting and len(begun) < room:
            sequence = next(iter(self._waiting.values()))
            sequence.scheduled = sequence.scheduled or time.monotonic_ns()
            count = min(sequence.num_pending, rest)
            sequence.num_pending -= count
            rest -= count
            if not sequence.num_pending:
                self._waiting.popitem(last=False)
                begun.append(sequence)
        self._num_waiting_tokens -= budget - rest
        return begun, budget - rest

    def _wait(self, seconds: float) -> None:
        """Let a step's time pass; one that begins late, by less than its length, ends on time."""
        if seconds:
            self._free_at = max(self._free_at, time.monotonic() - seconds) + seconds
            time.sleep(max(0.0, self._free_at - time.monotonic()))

    def _begin(self, sequence: MockSequence) -> None:
        """Have a sequence whose prompt is complete get its first token in this step."""
        request = sequence.request
        sequence.first_token = self._stepped
        self._release(request)
        begin(self._slot, sequence.num_prompt, 0)
        num_tokens = sequence.num_tokens if sequence.generates else 1
        sequence.last_step = self._step + num_tokens - 1
        self._ends.setdefault(sequence.last_step, {})[request.id] = sequence
        if sequence.generates:
            self._num_generating += 1
            self._rows[request.detokenizer].add(request.id, self._step, self._words_of(request))
            self._num_context += sequence.num_prompt

    def _words_of(self, request: GenerateRequest) -> Words | None:
        """Return the words of a sequence that has some of its own."""
        if request.script is not None:
            if request.script.interval_ms:
                self._intervals_ns[request.id] = request.script.interval_ms * 1_000_000
            return np.frombuffer(request.script.ids, np.uint32)
        return allowed_words(request, self._words) if request.allowed else None

    def _close(self, sequence: MockSequence, why: FinishReason, last_token: int) -> None:
        """Count a sequence that ends with its token of `last_token`, ns."""
        request = sequence.request
        num_left = max(0, sequence.last_step - self._step)
        num_generated = sequence.num_tokens - num_left if sequence.generates else 0
        moments = (sequence.queued, sequence.scheduled, sequence.first_token, last_token)
        counts = (sequence.num_prompt, 0, num_generated, request.max_tokens)
        close(self._slot, why, moments, counts)

    def _publish(self, index: int, begun: list[MockSequence], ended: list[MockSequence]) -> None:
        """Send a detokenizer the outputs of its sequences."""
        rows = self._rows[index]
        if not begun and not ended:  # most steps
            if rows:
                output = StepOutput({}, rows.ids, ONE * len(rows), UNFINISHED * len(rows))
                self._detokenizers.hold(index, output, rows.tokens(self._step))
            return
        mine = [sequence for sequence in begun if sequence.request.detokenizer == index]
        embedded = [s.request.id for s in mine if s.request.embeds]
        scored = [s.request.id for s in mine if not (s.request.embeds or s.generates)]
        if not (rows or embedded or scored):
            return
        finished = bytearray(UNFINISHED * len(rows))
        for sequence in ended:
            if sequence.request.detokenizer == index and sequence.generates:
                finished[rows.place(sequence.request.id)] = sequence.end
        output = StepOutput(
            started={s.request.id: s.request.plan for s in mine},
            ids=rows.ids + array("Q", embedded + scored).tobytes(),
            counts=ONE * len(rows) + NONE * len(embedded + scored),
            finished=bytes(finished)
            + bytes([FinishReason.STOP]) * len(embedded)
            + bytes([FinishReason.LENGTH]) * len(scored),
            embeddings=dict.fromkeys(embedded, self._vector),
            times={s.request.id: times_of(s) for s in mine if s.request.times is not None},
        )
        self._detokenizers.hold(index, output, rows.tokens(self._step))

    def _update_board(self) -> None:
        """Bring the board up to date. A prompt of which a part is computed counts as waiting."""
        if self._step > self._slot[EngineField.STEPS]:
            self._slot[EngineField.STEPPED_NS] = time.monotonic_ns()
        self._slot[EngineField.STEPS] = self._step
        self._slot[EngineField.RUNNING] = self._num_generating
        self._slot[EngineField.WAITING] = len(self._waiting)
        self._slot[EngineField.WAITING_TOKENS] = self._num_waiting_tokens
        self._slot[EngineField.PENDING_TOKENS] = self._num_waiting_tokens + self._num_generating
        used = -(-self._num_context // PAGE_TOKENS)
        self._slot[EngineField.PAGES_FREE] = max(0, self._num_pages - used)
        self._note_busy()

    def _note_busy(self) -> None:
        """Publish whether there are sequences, or outputs that are not sent."""
        is_busy = bool(self._sequences) or self._detokenizers.are_holding
        self._slot[EngineField.IS_BUSY] = is_busy
