"""The core writes the same bytes as the Python it stands in for."""

import codecs
import json
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.detokenizer_proc.inflight_responses import InflightResponses
from headrace.detokenizer_proc.text import (
    ByteStream,
    TableVocabulary,
    TextStream,
    Vocabulary,
    special_tokens,
)
from headrace.ipc.messages import (
    Api,
    FinishReason,
    ResponsePlan,
    StepOutput,
    request_id,
    request_of,
)
from headrace.model.token_table import TokenTable

SPECIAL = 300
WORDS = [b"a", b"ab", b" b", b"b\n", b'"', b"\\", b"\x00\x1f\x7f", "é".encode(), "世".encode()]
WORDS += [
    "🦊".encode(),
    "🦊".encode()[:2],
    "🦊".encode()[2:],
    b" ",
    b"",
    b"\xed\xa0\x80",
    b"\xf4\x90",
]
TOKENS = [bytes([byte]) for byte in range(256)] + WORDS
TOKENS += [b""] * (SPECIAL - len(TOKENS)) + [b"<end>", b"<pad>"]
TABLES = {
    strips: TokenTable(TOKENS, frozenset([SPECIAL, SPECIAL + 1]), strips)
    for strips in (False, True)
}
STOPS = ["ab", "b\n", "ba", "a a", "é", "世界", "\\", "aaaa"]
FRONTENDS = 3


class NoTable:
    """The same streams, of which the core knows nothing."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table

    def stream(
        self,
        skip_special_tokens: bool,
        spaces_between: bool = True,
        kept: frozenset[str] = frozenset(),
    ) -> TextStream:
        return ByteStream(self._table, skip_special_tokens)

    def special_tokens(self, contents: frozenset[str]) -> dict[int, str]:
        return special_tokens(self._table, contents)

    def token_bytes(self, id: int) -> bytes:
        return self._table.token_bytes[id]


@dataclass
class Text:
    """What a sequence is to say, in steps of some tokens each."""

    id: int
    plan: ResponsePlan
    steps: list[list[int]]
    finished: FinishReason


tokens = st.one_of(
    st.integers(256, 256 + len(WORDS) - 1), st.integers(0, 255), st.integers(SPECIAL, SPECIAL + 3)
)


@st.composite
def requests(draw: st.DrawFn) -> list[Text]:
    """Return the sequences of some requests."""
    texts: list[Text] = []
    for number in range(draw(st.integers(1, 4))):
        n = draw(st.integers(1, 3))
        request = request_id(draw(st.integers(0, FRONTENDS - 1)), number + 1)
        shared = {
            "response_id": f"cmpl-{number}",
            "model": draw(st.sampled_from(["tiny", 'a "model"\\'])),
            "created": 1_700_000_000 + number,
            "api": draw(st.sampled_from([Api.CHAT, Api.COMPLETION])),
            "stream": draw(st.booleans()),
            "include_usage": draw(st.booleans()),
            "num_sequences": n,
            "num_prompt_tokens": 5,
            "stop": draw(st.lists(st.sampled_from(STOPS), max_size=2)),
            "include_stop": draw(st.booleans()),
            "skip_special_tokens": draw(st.booleans()),
            "echo": draw(st.sampled_from(["", "", 'said "é"'])),
            "min_tokens": draw(st.integers(0, 3)),
            "n": n,
            "best_of": n,
        }
        for index in range(n):
            plan = ResponsePlan(index=index, shares_prompt=index > 0, **shared)  # type: ignore[arg-type]
            steps = draw(st.lists(st.lists(tokens, min_size=1, max_size=3), min_size=1, max_size=6))
            reason = draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
            texts.append(Text(request + index, plan, steps, reason))
    return texts


def steps_of(
    texts: list[Text], seed: int, aborts: bool = True
) -> Iterator[tuple[StepOutput, bytes]]:
    """Yield the messages of an engine, with the texts in some order, and some aborted."""
    rng = random.Random(seed)
    left = {text.id: list(text.steps) for text in texts}
    by_id = {text.id: text for text in texts}
    started: set[int] = set()
    while left:
        if aborts and rng.random() < 0.1:
            gone = rng.choice(list(left))
            plans = {} if gone in started else {gone: msgspec.msgpack.encode(by_id[gone].plan)}
            yield StepOutput.of(plans, [gone], [0], [FinishReason.ABORT]), b""
            left = {id: steps for id, steps in left.items() if id >> 16 != gone >> 16}
        ids = [id for id in left if rng.random() < 0.7]
        plans, cached = {}, {}
        rows: list[tuple[int, int, FinishReason | None]] = []
        said: list[int] = []
        for id in ids:
            new = left[id].pop(0)
            is_last = not left[id]
            if id not in started:
                started.add(id)
                plans[id] = msgspec.msgpack.encode(by_id[id].plan)
                cached[id] = 2
            rows.append((id, len(new), by_id[id].finished if is_last else None))
            said += new
            if is_last:
                del left[id]
        columns = [[row[column] for row in rows] for column in range(3)]
        yield StepOutput.of(plans, *columns, cached=cached), array("I", said).tobytes()


class Heard:
    """What frontends and the engine are told."""

    def __init__(self) -> None:
        self.bytes: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.heads: dict[int, tuple[int, str]] = {}
        self.stops: list[int] = []
        self.num_delivered: dict[int, int] = {}

    def hear(self, responses: InflightResponses) -> None:
        self.stops += [stop.id for stop in responses.stops()]
        for frontend in range(FRONTENDS):
            frames = responses.render(frontend)
            if frames is None:
                continue
            for sequence, head, data, last, told in frames.message().split(frames.data()):
                id = request_of(sequence)
                assert id >> 56 == frontend
                assert id not in self.ended
                self.num_delivered[sequence] = told
                if head is not None:
                    self.heads[id] = (head.status, head.content_type)
                assert id in self.heads, "the head goes first"
                self.bytes[id] = self.bytes.get(id, b"") + bytes(data)
                if last:
                    self.ended.add(id)

    def forget_aborted(self, output: StepOutput) -> None:
        """Let go of what is not told to its end."""
        for id, _, reason in output.rows():
            if reason is FinishReason.ABORT:
                self.bytes.pop(id >> 16 << 16, None)
                self.ended.discard(id >> 16 << 16)
                self.heads.pop(id >> 16 << 16, None)


@settings(deadline=None, max_examples=300)
@given(texts=requests(), seed=st.integers(0, 1000), strips=st.booleans())
def test_the_core_writes_what_python_writes(texts: list[Text], seed: int, strips: bool) -> None:
    vocabularies: list[Vocabulary] = [TableVocabulary(TABLES[strips]), NoTable(TABLES[strips])]
    all_responses = [InflightResponses(vocabulary, FRONTENDS) for vocabulary in vocabularies]
    heard = [Heard(), Heard()]
    for output, ids in steps_of(texts, seed):
        for responses, ears in zip(all_responses, heard, strict=True):
            responses.feed(output, ids)
            ears.hear(responses)
            ears.forget_aborted(output)
    core, python = heard
    assert core.bytes == {id: data for id, data in python.bytes.items() if data or id in core.bytes}
    assert (core.ended, core.stops) == (python.ended, python.stops)
    assert {id: core.heads[id] for id in python.heads} == python.heads
    assert len(all_responses[0]) == len(all_responses[1]) == 0
    assert not all_responses[0]._core_responses


def texts_told(data: bytes) -> tuple[dict[int, tuple[str, str | None]], int]:
    """Return the texts and ends of a stream by index, and how often it ends."""
    found: dict[int, tuple[str, str | None]] = {}
    *lines, rest = data.decode().split("\n\n")
    assert not rest, "events are whole"
    for line in lines:
        if line == "data: [DONE]":
            continue
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            before, end = found.get(choice["index"], ("", None))
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            assert end is None, "nothing is told after an end"
            found[choice["index"]] = (before + text, choice["finish_reason"])
    return found, lines.count("data: [DONE]")


def play(
    responses: InflightResponses, texts: list[Text], seed: int, num_steps: int | None = None
) -> Heard:
    """Return what is told of some texts, all of it or what the first steps bring."""
    ears = Heard()
    for output, ids in islice(steps_of(texts, seed, aborts=False), num_steps):
        responses.feed(output, ids)
        ears.hear(responses)
    return ears


@settings(deadline=None, max_examples=200)
@given(
    texts=requests(),
    seeds=st.tuples(st.integers(0, 1000), st.integers(0, 1000)),
    num_steps=st.integers(0, 20),
    interval=st.integers(1, 4),
    in_core=st.booleans(),
)
def test_another_process_goes_on_where_the_client_is(
    texts: list[Text], seeds: tuple[int, int], num_steps: int, interval: int, in_core: bool
) -> None:
    table = TABLES[False]
    vocabulary: Vocabulary = TableVocabulary(table) if in_core else NoTable(table)
    texts = [replace(t, plan=msgspec.structs.replace(t.plan, stream=True)) for t in texts]
    whole = play(InflightResponses(vocabulary, FRONTENDS, interval), texts, seeds[0])
    before = play(InflightResponses(vocabulary, FRONTENDS, interval), texts, seeds[0], num_steps)
    again = [
        replace(
            t, plan=msgspec.structs.replace(t.plan, num_delivered=before.num_delivered.get(t.id))
        )
        for t in texts
        if request_of(t.id) not in before.ended
    ]
    responses = InflightResponses(vocabulary, FRONTENDS, interval)
    after = play(responses, again, seeds[1])
    for id, data in whole.bytes.items():
        told = before.bytes.get(id, b"") + after.bytes.get(id, b"")
        assert texts_told(told) == texts_told(data)
        if id not in before.ended:
            assert usage_told(told) == usage_told(data)
    assert len(responses) == 0


@settings(deadline=None, max_examples=50)
@given(
    texts=requests(),
    seed=st.integers(0, 1000),
    num_steps=st.integers(0, 20),
    in_core=st.booleans(),
)
def test_what_open_sequences_have_said_is_known(
    texts: list[Text], seed: int, num_steps: int, in_core: bool
) -> None:
    vocabulary: Vocabulary = TableVocabulary(TABLES[False]) if in_core else NoTable(TABLES[False])
    texts = [replace(t, plan=msgspec.structs.replace(t.plan, stop=[])) for t in texts]
    responses = InflightResponses(vocabulary, FRONTENDS)
    heard = play(responses, texts, seed, num_steps)
    fed: dict[int, list[int]] = {}
    for output, ids in islice(steps_of(texts, seed, aborts=False), num_steps):
        tokens = iter(array("I", ids))
        for id, count, _ in output.rows():
            fed.setdefault(id, []).extend(islice(tokens, count))
    said, data = responses.generated()
    tokens = iter(array("I", data))
    counts = zip(array("Q", said.ids), array("I", said.counts), strict=True)
    found = {id: list(islice(tokens, count)) for id, count in counts}
    assert next(tokens, None) is None
    assert found == {id: said for id, said in fed.items() if request_of(id) not in heard.ended}


def usage_told(data: bytes) -> object:
    """Return the usage of a stream, where there is one."""
    return [json.loads(e[6:])["usage"] for e in data.decode().split("\n\n") if '"usage":{' in e]


def events(data: bytes) -> list[str]:
    """Return the texts of a stream's events."""
    lines = data.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    bodies = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    return [choice["text"] for body in bodies for choice in body["choices"]]


def completion(**fields: object) -> ResponsePlan:
    defaults: dict[str, object] = {
        **{
            "response_id": "x",
            "model": "tiny",
            "created": 1,
            "api": Api.COMPLETION,
            "stream": True,
        },
        **{"include_usage": False, "num_sequences": 1, "num_prompt_tokens": 1, "index": 0},
        **{"stop": [], "include_stop": False, "skip_special_tokens": True},
    }
    return ResponsePlan(**(defaults | fields))  # type: ignore[arg-type]


def stream(responses: InflightResponses, text: str, together: int) -> list[str]:
    """Return the events of a text, a byte a step, rendered so many steps at a time."""
    id, ears = request_id(0, 1), Heard()
    for place, byte in enumerate(text.encode()):
        is_last = place == len(text) - 1
        output = StepOutput.of({}, [id], [1], [FinishReason.LENGTH if is_last else None])
        if not place:
            output.started[id] = msgspec.msgpack.encode(completion())
        responses.feed(output, array("I", [byte]).tobytes())
        if is_last or place % together == together - 1:
            ears.hear(responses)
    assert ears.ended == {id}
    return events(ears.bytes[id])


@pytest.mark.parametrize(
    ("interval", "expected"),
    [(1, [*"abcdefgh"]), (3, ["a", "bcd", "efg", "h"]), (100, ["a", "bcdefgh"])],
)
def test_events_come_at_intervals_but_for_the_first_and_the_last(
    interval: int, expected: list[str]
) -> None:
    responses = InflightResponses(TableVocabulary(TABLES[False]), FRONTENDS, interval)
    assert stream(responses, "abcdefgh", together=1) == expected


def test_steps_that_are_rendered_together_are_one_event() -> None:
    responses = InflightResponses(TableVocabulary(TABLES[False]), FRONTENDS)
    assert stream(responses, "abcdefgh", together=3) == ["abc", "def", "gh"]


@pytest.mark.parametrize("end", [b"", b"\x80", b"A", b"\xe9", b"\xed\xa0"])
def test_a_surrogate_waits_for_one_byte_more_as_in_python(end: bytes) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    data, ears, id = b"\xed\xa0" + end, Heard(), request_id(0, 1)
    responses = InflightResponses(TableVocabulary(TABLES[False]), FRONTENDS)
    expected: list[str] = []
    for place, byte in enumerate(data):
        is_last = place == len(data) - 1
        output = StepOutput.of({}, [id], [1], [FinishReason.LENGTH if is_last else None])
        if not place:
            output.started[id] = msgspec.msgpack.encode(completion())
        responses.feed(output, array("I", [byte]).tobytes())
        ears.hear(responses)
        expected.append(decoder.decode(bytes([byte]), final=is_last))
    assert events(ears.bytes[id]) == [text for text in expected if text]


def test_the_head_goes_before_there_is_text() -> None:
    responses, ears = InflightResponses(TableVocabulary(TABLES[False]), FRONTENDS), Heard()
    id = request_id(0, 1)
    started = {id: msgspec.msgpack.encode(completion())}
    half = array("I", ["é".encode()[0]]).tobytes()
    responses.feed(StepOutput.of(started, [id], [1], [None]), half)
    ears.hear(responses)
    assert ears.heads == {id: (200, "text/event-stream; charset=utf-8")}
    assert ears.bytes == {id: b""}
