"""Measure a step in a detokenizer process, written by the core and by Python.

Method: chats stream 64 tokens each with the demo model's vocabulary, in steps of B sequences, one
        token each. The next chat follows each that ends. Decoding the message, all texts, and the
        message to the frontend are in it; sending is not. Rounds alternate. Processor time, which a
        busy machine stretches less than the clock's.
Run:    python bench/detokenizer.py --rounds 5
"""

import itertools
import random
import time
from array import array

import msgspec

from headrace.config.model_card import find_demo_model
from headrace.detokenizer_proc.inflight_responses import InflightResponses
from headrace.detokenizer_proc.text import TextStream, Vocabulary, load_vocabulary
from headrace.ipc.messages import (
    Api,
    FinishReason,
    ResponsePlan,
    StepOutput,
    ToDetokenizer,
    request_id,
)
from support.report import Quantity, Report, parser

BATCHES = (1, 64, 256)
NUM_TOKENS = 64
VOCABULARY = 49_152
STEPS = 400
CORE, PYTHON = "core", "Python"


class NoTable:
    """A vocabulary that the core does not have."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def stream(
        self,
        skip_special_tokens: bool,
        spaces_between: bool = True,
        kept: frozenset[str] = frozenset(),
    ) -> TextStream:
        """Open a stream."""
        return self._vocabulary.stream(skip_special_tokens, spaces_between)

    def special_tokens(self, contents: frozenset[str]) -> dict[int, str]:
        """Return those special tokens, by id, whose text is one of `contents`."""
        return self._vocabulary.special_tokens(contents)

    def token_bytes(self, id: int) -> bytes:
        """Return what a token is by itself."""
        return self._vocabulary.token_bytes(id)


def plan(number: int) -> bytes:
    """Return the plan of a chat."""
    return msgspec.msgpack.encode(
        ResponsePlan(
            response_id=f"chatcmpl-{number:024x}",
            model="SmolLM2-135M-Instruct",
            created=1_795_227_371,
            api=Api.CHAT,
            stream=True,
            include_usage=False,
            num_sequences=1,
            num_prompt_tokens=40,
            index=0,
            stop=[],
            include_stop=False,
            skip_special_tokens=True,
        )
    )


def steps(batch: int) -> list[tuple[bytes, bytes]]:
    """Return the messages of an engine, encoded, with their bulk."""
    rng = random.Random(batch)
    numbers = itertools.count(1)
    # Sequences at all places of their texts.
    running = {request_id(0, next(numbers)): NUM_TOKENS * i // batch for i in range(batch)}
    new = set(running)
    found = []
    for _ in range(STEPS):
        ids = list(running)
        ends = [FinishReason.LENGTH if running[id] == NUM_TOKENS - 1 else None for id in ids]
        started = {id: plan(id) for id in ids if id in new}
        output = StepOutput.of(started, ids, [1] * len(ids), ends)
        tokens = array("I", (rng.randrange(17, VOCABULARY) for _ in ids))
        found.append((msgspec.msgpack.encode(output), tokens.tobytes()))
        new = set()
        for id, end in zip(ids, ends, strict=True):
            running[id] += 1
            if end is not None:
                del running[id]
                new.add(request_id(0, next(numbers)))
        running |= dict.fromkeys(new, 0)
    return found


def measure(vocabulary: Vocabulary, messages: list[tuple[bytes, bytes]]) -> float:
    """Return the processor time of a step, us."""
    responses = InflightResponses(vocabulary, 1)
    decoder: msgspec.msgpack.Decoder[ToDetokenizer] = msgspec.msgpack.Decoder(ToDetokenizer)
    encoder = msgspec.msgpack.Encoder()
    began = time.process_time_ns()
    for message, tokens in messages:
        responses.feed(decoder.decode(message), tokens)
        frames = responses.render(0)
        if frames is not None:
            encoder.encode(frames.message())
            frames.data()
    return (time.process_time_ns() - began) / len(messages) / 1e3


def main() -> None:
    """Run and print the report."""
    args = parser(__doc__, rounds=5).parse_args()
    report = Report("detokenizer", args)
    model = find_demo_model()
    assert model is not None, "the demo model is not installed"
    table = load_vocabulary(str(model))
    systems: dict[str, Vocabulary] = {CORE: table, PYTHON: NoTable(table)}
    for batch in BATCHES:
        messages = steps(batch)
        samples: dict[str, list[float]] = {system: [] for system in systems}
        for _ in range(args.rounds):
            for system, vocabulary in systems.items():
                samples[system].append(measure(vocabulary, messages))
        report.add(Quantity(f"a step of {batch}", "us", samples))
    report.finish()


if __name__ == "__main__":
    main()
