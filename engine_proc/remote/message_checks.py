"""What messages of another machine may hold. Its key lets it in; its numbers are not trusted."""

import msgspec

from headrace.ipc.messages import StepOutput
from headrace.ipc.prefix_index import PLACES, WORD_BYTES
from headrace.ipc.remote_messages import CachedPages, Outputs, SessionStatus
from headrace.ipc.sockets import Frame

TOKEN_BYTES = 4
PLACE_BYTES = 4
MAX_WORD = 1 << 63

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


def check_outputs(outputs: Outputs, steps: list[Frame], num_detokenizers: int, engine: int) -> None:
    """Check steps before detokenizers get them.

    Raises:
        WrongMessage: they are of another engine, for no detokenizer, or incomplete.
        msgspec.MsgspecError: they are no steps.
    """
    index = outputs.detokenizer
    check(0 <= index < num_detokenizers, f"steps for detokenizer {index} of {num_detokenizers}")
    check(len(steps) % 2 == 0, f"{len(steps)} frames of steps")
    for encoded, tokens in zip(steps[::2], steps[1::2], strict=True):
        step = step_decoder.decode(encoded)
        check(step.engine == engine, f"a step of engine {step.engine}, not {engine}")
        try:
            num_tokens = sum(count for _, count, _ in step.rows())
        except (ValueError, TypeError) as error:
            raise WrongMessage(f"the columns of a step do not fit: {error}") from None
        num_bytes = memoryview(tokens).nbytes
        check(num_bytes == TOKEN_BYTES * num_tokens, f"{num_bytes} bytes of {num_tokens} tokens")


def check_pages(pages: CachedPages, frames: list[Frame]) -> None:
    """Check changes of the prefix index.

    Raises:
        WrongMessage: they are out of range or incomplete.
    """
    num_places, rest = divmod(len(pages.places), PLACE_BYTES)
    sizes = [memoryview(frame).nbytes for frame in frames]
    check(not rest and sizes == [WORD_BYTES * num_places], f"{num_places} places, {sizes} bytes")
    places = memoryview(pages.places).cast("I")
    check(max(places, default=0) < PLACES, f"place {max(places, default=0)} of {PLACES}")
