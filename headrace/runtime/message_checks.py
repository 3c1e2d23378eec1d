"""What messages of another machine may hold. Its key lets it in; its numbers are not trusted."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from headrace.board.fields import MAX_MODELS
from headrace.ipc.messages import NOT_FINISHED, FinishReason, StepOutput
from headrace.ipc.prefix_index import PLACES, WORD_BYTES
from headrace.ipc.remote_messages import CachedPages, Outputs, SessionStatus
from headrace.ipc.sockets import Frame

TOKEN_BYTES = 4
PLACE_BYTES = 4
NUM_INDEXES = 2  # of an engine: its own, and its store's
MAX_WORD = 1 << 63
ENDS = frozenset({NOT_FINISHED, *FinishReason})

step_decoder = msgspec.msgpack.Decoder(StepOutput)


class WrongMessage(ValueError):
    """A message of another machine has what it cannot have."""


def check(is_right: bool, what: str) -> None:
    """Raise where a peer is wrong.

    Raises:
        WrongMessage: it is.
    """
    if not is_right:
        raise WrongMessage(what)


def check_status(status: SessionStatus, now: int) -> None:
    """Check the times and counts of a status.

    Args:
        now: CLOCK_MONOTONIC, ns.

    Raises:
        WrongMessage: they are out of range.
    """
    check(0 <= status.granted_at <= now, f"it answers a grant of {status.granted_at} at {now}")
    check(0 <= status.at < MAX_WORD, f"its clock is at {status.at}")
    check(0 <= status.num_taken < MAX_WORD, f"it has taken {status.num_taken} tokens")


class OutputLimits(NamedTuple):
    """What the outputs of a remote engine may name."""

    engine: int  # its seat
    num_detokenizers: int
    vocab_size: int


def check_outputs(
    outputs: Outputs, steps: list[Frame], limits: OutputLimits
) -> list[tuple[StepOutput, Frame]]:
    """Check steps before detokenizers get them, and return each with its tokens.

    Raises:
        WrongMessage: they are of another engine, for no detokenizer, incomplete, or have tokens
            that the vocabulary does not have.
        msgspec.MsgspecError: they are no steps.
    """
    index, (engine, num_detokenizers, vocab_size) = outputs.detokenizer, limits
    check(0 <= index < num_detokenizers, f"steps for detokenizer {index} of {num_detokenizers}")
    check(len(steps) % 2 == 0, f"{len(steps)} frames of steps")
    checked = list[tuple[StepOutput, Frame]]()
    for encoded, tokens in zip(steps[::2], steps[1::2], strict=True):
        step = step_decoder.decode(encoded)
        if step.engine != engine:
            raise WrongMessage(f"a step of engine {step.engine}, not {engine}")
        for times in step.times.values():
            check(0 <= times.model < MAX_MODELS, f"times of model {times.model} of {MAX_MODELS}")
        try:
            num_tokens = count_tokens(step)
            largest = max(memoryview(tokens).cast("B").cast("I"), default=0)
            if step.prompts or step.logprobs or step.prompt_logprobs:
                largest = max(largest, max(other_tokens_of(step), default=0))
        except (ValueError, TypeError) as error:
            raise WrongMessage(f"the columns of a step do not fit: {error}") from None
        num_bytes = memoryview(tokens).nbytes
        if num_bytes != TOKEN_BYTES * num_tokens:
            raise WrongMessage(f"{num_bytes} bytes of {num_tokens} tokens")
        if largest >= vocab_size:
            raise WrongMessage(f"token {largest} of a vocabulary of {vocab_size}")
        checked.append((step, tokens))
    return checked


def count_tokens(step: StepOutput) -> int:
    """Return how many tokens the rows of a step have.

    Raises:
        ValueError: the columns are of different lengths, or rows end as none can.
        TypeError: the bytes are no numbers.
    """
    counts = memoryview(step.counts).cast("I")
    sizes = {len(memoryview(step.ids).cast("Q")), len(counts), len(step.finished)}
    if len(sizes) > 1 or not ENDS.issuperset(step.finished):
        raise ValueError(f"rows of {sorted(sizes)} and ends {sorted(set(step.finished))}")
    return sum(counts)


def other_tokens_of(step: StepOutput) -> Iterator[int]:
    """Yield the token ids of a step that are in prompts or rows of log probabilities, as u32.

    Raises:
        ValueError: such rows are incomplete.
        TypeError: the bytes are no ids.
    """
    for prompt in step.prompts.values():
        yield from memoryview(prompt).cast("I")
    num_rows = {id: len(prompt) // TOKEN_BYTES - 1 for id, prompt in step.prompts.items()}
    for id, rows in step.prompt_logprobs.items():
        yield from ranked_tokens(rows, num_rows.get(id, 0))
    num_rows = {id: count for id, count, _ in step.rows()}
    for id, rows in step.logprobs.items():
        yield from ranked_tokens(rows, num_rows.get(id, 0))


def ranked_tokens(rows: bytes, count: int) -> Iterator[int]:
    """Yield the tokens in rows of `token_logprobs.py`, as u32.

    Raises:
        ValueError: they are not so many rows.
    """
    num_words, rest = divmod(len(rows), TOKEN_BYTES * max(count, 1))
    if rest or num_words % 2 or bool(num_words) != bool(count):
        raise ValueError(f"{len(rows)} bytes of {count} rows of log probabilities")
    words = memoryview(rows).cast("I")
    for start in range(0, len(words), max(num_words, 1)):
        yield from words[start + 2 : start + num_words : 2]


def check_pages(pages: CachedPages, frames: list[Frame]) -> None:
    """Check changes of a prefix index.

    Raises:
        WrongMessage: they are out of range or incomplete.
    """
    check(0 <= pages.index < NUM_INDEXES, f"pages of index {pages.index} of {NUM_INDEXES}")
    num_places, rest = divmod(len(pages.places), PLACE_BYTES)
    sizes = [memoryview(frame).nbytes for frame in frames]
    check(not rest and sizes == [WORD_BYTES * num_places], f"{num_places} places, {sizes} bytes")
    places = memoryview(pages.places).cast("I")
    check(max(places, default=0) < PLACES, f"place {max(places, default=0)} of {PLACES}")
