"""A response that cannot be written ends with an error, and no other response notices."""

import signal

import msgspec
import pytest
from byte_responses import TABLE, ByteVocabulary, make_plan, take

from headrace.detokenizer_proc import text_response as response_module
from headrace.detokenizer_proc.inflight_responses import InflightResponses
from headrace.detokenizer_proc.parsers.pieces import Content, Piece
from headrace.detokenizer_proc.text import TableVocabulary
from headrace.ipc.messages import (
    Abort,
    FinishReason,
    Parsing,
    StepOutput,
    request_id,
)
from headrace.ipc.token_logprobs import TokenLogprob
from headrace.model.output_formats import ToolFormat
from headrace.system.cpu_limit import CpuLimit

LENGTH, ABORT = FinishReason.LENGTH, FinishReason.ABORT


class EndlessParser:
    """A parser that does not come to an end with some texts."""

    thought = range(0)

    def feed(self, text: str) -> list[Piece]:
        while "!" in text:
            pass
        return [Content(text)]

    def flush(self) -> list[Piece]:
        return []


class BrokenParser:
    """A parser with a bug that some texts bring to light."""

    thought = range(0)

    def feed(self, text: str) -> list[Piece]:
        assert "!" not in text
        return [Content(text)]

    def flush(self) -> list[Piece]:
        return []


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("ended", [None, LENGTH])
def test_a_parser_that_throws_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, stream: bool, ended: FinishReason | None
) -> None:
    monkeypatch.setattr(response_module, "parser_of", lambda parsing, **_: BrokenParser())
    responses = InflightResponses(ByteVocabulary(), 1)
    broken, sound = request_id(0, 1), request_id(0, 2)
    plan = msgspec.msgpack.encode(make_plan(stream=stream))
    started = {broken: plan, sound: plan}
    both = [broken, sound]
    data = take(responses, StepOutput.of(started, both, [1, 1], [None, None]), b"a\0\0\0b\0\0\0")[0]
    sent = data[0].data() if stream else b""
    outgoing, stops = take(
        responses, StepOutput.of({}, both, [1, 1], [ended, None]), b"!\0\0\0c\0\0\0"
    )
    sent += outgoing[0].data()
    assert stops == [Abort(broken)]
    assert sent.count(b"server_error") == 1
    assert (outgoing[0].message().heads == {}) == stream
    if ended is None:  # the engine has not heard of it yet, and says when it has
        take(responses, StepOutput.of({}, [broken], [1], [None]), b"x\0\0\0")
        take(responses, StepOutput.of({}, [broken], [0], [ABORT]), b"")
    assert len(responses) == 1
    outgoing, stops = take(responses, StepOutput.of({}, [sound], [1], [LENGTH]), b"d\0\0\0")
    assert b"d" in outgoing[0].data()
    assert (stops, len(responses)) == ([], 0)


def test_a_parser_that_takes_too_long_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(response_module, "parser_of", lambda parsing, **_: EndlessParser())
    responses = InflightResponses(ByteVocabulary(), 1, limit=CpuLimit(0.5))
    endless, sound = request_id(0, 1), request_id(0, 2)
    plan = msgspec.msgpack.encode(make_plan(parsing=Parsing(tools=ToolFormat.HERMES)))
    output = StepOutput.of({endless: plan, sound: plan}, [endless, sound], [1, 1], [LENGTH] * 2)
    outgoing, stops = take(responses, output, b"!\0\0\0b\0\0\0")
    assert stops == [Abort(endless)]
    sent = outgoing[0].data()
    assert sent.count(b"server_error") == 1
    assert b'"text":"b"' in sent
    assert len(responses) == 0
    assert [signal.getitimer(t) for t in (signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)] == [
        (0, 0)
    ] * 2


def test_a_stream_that_began_elsewhere_fails_as_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_module, "parser_of", lambda parsing, **_: BrokenParser())
    responses = InflightResponses(ByteVocabulary(), 1)
    broken = request_id(0, 1)
    started = {broken: msgspec.msgpack.encode(make_plan(stream=True, num_delivered=1))}
    tokens = b"a\0\0\0!\0\0\0"
    outgoing, _ = take(responses, StepOutput.of(started, [broken], [2], [None]), tokens)
    assert outgoing[0].data().startswith(b"data: ")
    assert b"server_error" in outgoing[0].data()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("logprobs", [None, 0])
@pytest.mark.parametrize("has_begun", [True, False])
@pytest.mark.parametrize("reason", ["", "the grammar could not be followed after 1 tokens"])
def test_a_request_that_the_engine_fails_gets_an_error(
    stream: bool, logprobs: int | None, has_begun: bool, reason: str
) -> None:
    responses = InflightResponses(TableVocabulary(TABLE), 2)
    id = request_id(0, 1)
    plan = msgspec.msgpack.encode(make_plan(stream=stream, logprobs=logprobs, num_sequences=2))
    likely = {} if logprobs is None else {id: TokenLogprob(0, 1, []).pack()}
    if has_begun:
        take(responses, StepOutput.of({id: plan}, [id], [1], [None], logprobs=likely), b"a\0\0\0")
    reasons = {id: reason} if reason else {}
    output = StepOutput.of({}, [id + 1], [0], [ABORT], failed={id: plan}, reasons=reasons)
    outgoing, stops = take(responses, output, b"")
    data, message = outgoing[0].data(), outgoing[0].message()
    assert (reason or "the server failed at this request").encode() in data
    assert (data.count(b"server_error"), list(message.last), stops) == (1, [1], [])
    if stream and has_begun:
        assert data.startswith(b"data: ")
        assert message.heads == {}
    else:
        assert msgspec.json.decode(data)["error"]["code"] == "internal_error"
        assert message.heads[id].status == 500
    assert len(responses) == 0
