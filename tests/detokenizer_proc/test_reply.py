"""A reply's sequences become bytes, and its end is where all of them have ended."""

import json
from array import array
from typing import Any

import msgspec

from headrace.detokenizer_proc.main import Frames, Replies
from headrace.detokenizer_proc.reply import Reply
from headrace.detokenizer_proc.text import ByteStream, TextStream
from headrace.messages import (
    FinishReason,
    Head,
    ReplyPlan,
    ResponseFrames,
    StepOutput,
    Stop,
    request_id,
)

END = 0
STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


class ByteVocabulary:
    """Ids are bytes; 0 is a special end token, written `<end>`."""

    def stream(self, skip_special_tokens: bool) -> TextStream:
        table = [b"<end>", *(bytes([byte]) for byte in range(1, 256))]
        return ByteStream(table, frozenset([END] if skip_special_tokens else []))


def make_plan(**fields: Any) -> ReplyPlan:
    defaults: dict[str, Any] = {
        "response_id": "x-1",
        "model": "tiny",
        "created": 5,
        "chat": False,
        "stream": False,
        "include_usage": False,
        "num_sequences": 1,
        "num_prompt_tokens": 3,
        "index": 0,
        "stop": [],
        "include_stop": False,
        "skip_special_tokens": True,
    }
    return ReplyPlan(**(defaults | fields))


def open_reply(**fields: Any) -> tuple[Reply, bytes]:
    plan = make_plan(**fields)
    reply = Reply(plan)
    opening = b""
    for index in range(plan.num_sequences):
        sequence = msgspec.structs.replace(plan, index=index, shares_prompt=index > 0)
        opening += reply.open(sequence, ByteVocabulary())
    return reply, opening


def ids(text: str) -> list[int]:
    return list(text.encode())


def only_choice(body: bytes) -> tuple[str, str]:
    (choice,) = json.loads(body)["choices"]
    return choice["text"], choice["finish_reason"]


def streamed(data: bytes) -> list[tuple[str, str | None]]:
    """Return text and finish reason of each event, but for the last."""
    *events, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    return [(choice["text"], choice["finish_reason"]) for choice in choices]


def test_a_whole_answer_comes_with_the_last_token() -> None:
    reply, _ = open_reply()
    assert reply.feed(0, ids("He"), None) == (b"", False)
    assert not reply.is_complete
    body, _ = reply.feed(0, ids("llo"), LENGTH)
    assert reply.is_complete
    assert only_choice(body) == ("Hello", "length")
    assert json.loads(body)["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_stop_token_ends_the_text_without_being_in_it() -> None:
    for skip in (True, False):
        reply, _ = open_reply(skip_special_tokens=skip)
        body, stopped_here = reply.feed(0, [*ids("Hi"), END], STOP)
        assert only_choice(body) == ("Hi", "stop")
        assert json.loads(body)["usage"]["completion_tokens"] == 3
        assert not stopped_here, "the engine knows"


def test_the_stop_token_is_in_the_text_where_that_is_wanted() -> None:
    reply, _ = open_reply(skip_special_tokens=False, include_stop=True)
    assert only_choice(reply.feed(0, [*ids("Hi"), END], STOP)[0]) == ("Hi<end>", "stop")


def test_a_stop_string_ends_the_text_and_the_engine_is_to_be_told() -> None:
    reply, _ = open_reply(stop=["ll"])
    assert reply.feed(0, ids("Hel"), None) == (b"", False)
    body, stopped_here = reply.feed(0, ids("lo"), None)
    assert only_choice(body) == ("He", "stop")
    assert stopped_here
    assert json.loads(body)["usage"]["completion_tokens"] == 4, "the token after it is not read"


def test_a_stop_string_in_the_last_token_is_a_stop() -> None:
    reply, _ = open_reply(stop=["o"])
    body, stopped_here = reply.feed(0, ids("Hello"), LENGTH)
    assert only_choice(body) == ("Hell", "stop")
    assert not stopped_here, "the engine has ended it too"


def test_text_held_for_a_stop_string_comes_with_the_end() -> None:
    reply, _ = open_reply(stop=["END"])
    assert only_choice(reply.feed(0, ids("the EN"), LENGTH)[0]) == ("the EN", "length")


def test_an_incomplete_character_is_replaced_at_the_end() -> None:
    reply, _ = open_reply()
    assert only_choice(reply.feed(0, ids("é")[:1], LENGTH)[0]) == ("\ufffd", "length")


def test_tokens_after_a_stop_string_are_not_looked_at() -> None:
    reply, _ = open_reply(stop=["!"], num_sequences=2)
    assert reply.feed(0, ids("a!"), None) == (b"", True)
    assert reply.feed(0, ids("more"), LENGTH) == (b"", False)
    body, _ = reply.feed(1, ids("b"), LENGTH)
    assert [c["text"] for c in json.loads(body)["choices"]] == ["a", "b"]


def test_choices_are_in_order_however_they_end() -> None:
    reply, _ = open_reply(num_sequences=3)
    assert reply.feed(2, ids("c"), LENGTH)[0] == b""
    assert reply.feed(0, ids("a"), STOP)[0] == b""
    body = json.loads(reply.feed(1, ids("bb"), LENGTH)[0])
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert [c["finish_reason"] for c in body["choices"]] == ["stop", "length", "length"]
    assert body["usage"]["prompt_tokens"] == 3, "a prompt that is shared counts once"
    assert body["usage"]["completion_tokens"] == 4


def test_a_reply_is_not_complete_before_its_last_sequence_has_come() -> None:
    plan = make_plan(num_sequences=2)
    reply = Reply(plan)
    reply.open(plan, ByteVocabulary())
    assert reply.feed(0, ids("a"), LENGTH) == (b"", False)
    assert not reply.is_complete


def test_a_stream_gives_text_as_it_becomes_certain() -> None:
    reply, opening = open_reply(stream=True)
    data = opening
    for token in ids("é!"):
        data += reply.feed(0, [token], None)[0]
    data += reply.feed(0, [END], STOP)[0]
    assert streamed(data) == [("é", None), ("!", None), ("", "stop")]


def test_the_echo_goes_before_the_text() -> None:
    reply, _ = open_reply(echo="1, 2,")
    assert only_choice(reply.feed(0, ids(" 3"), LENGTH)[0]) == ("1, 2, 3", "length")
    reply, opening = open_reply(echo="1, 2,", stream=True)
    data = opening + reply.feed(0, ids(" 3"), LENGTH)[0]
    assert streamed(data) == [("1, 2,", None), (" 3", "length")]


def test_a_stop_string_in_the_echo_stops_nothing() -> None:
    reply, _ = open_reply(echo="stop!", stop=["!"])
    assert only_choice(reply.feed(0, ids("no"), LENGTH)[0]) == ("stop!no", "length")


# What one step brings for several frontends


def make_output(
    *news: tuple[int, str, FinishReason | None], started: dict[int, ReplyPlan] | None = None
) -> tuple[StepOutput, bytes]:
    plans = {id: msgspec.msgpack.encode(plan) for id, plan in (started or {}).items()}
    tokens = [ids(text) for _, text, _ in news]
    output = StepOutput(plans, [n[0] for n in news], [len(t) for t in tokens], [n[2] for n in news])
    return output, array("I", [id for t in tokens for id in t]).tobytes()


A, B, C = request_id(0, 1), request_id(0, 2), request_id(1, 1)


def test_each_frontend_gets_one_message_with_what_is_its_own() -> None:
    replies = Replies(ByteVocabulary())
    started = {id: make_plan(stream=True, response_id=f"r{id}") for id in (A, B, C)}
    news = [(A, "a", None), (C, "c", None), (B, "b", LENGTH)]
    outgoing, stops = replies.take(*make_output(*news, started=started))
    assert stops == []
    assert outgoing.keys() == {0, 1}
    message, data = outgoing[0].message(), outgoing[0].data()
    assert (message.ids, message.last) == ([A, B], [False, True])
    assert sum(message.lengths) == len(data)
    assert b'"text":"a"' in data[: message.lengths[0]]
    assert data.endswith(b"data: [DONE]\n\n")
    assert outgoing[1].message().ids == [C]
    assert len(replies) == 2, "B is done"


def test_the_head_comes_with_the_first_bytes_and_only_there() -> None:
    replies = Replies(ByteVocabulary())
    first, _ = replies.take(*make_output((A, "a", None), started={A: make_plan(stream=True)}))
    assert first[0].message().heads == {A: Head(200, "text/event-stream; charset=utf-8")}
    second, _ = replies.take(*make_output((A, "b", None)))
    assert second[0].message().heads == {}


def test_sequences_of_one_request_share_an_entry() -> None:
    replies = Replies(ByteVocabulary())
    started = {A + i: make_plan(stream=True, num_sequences=2, index=i) for i in range(2)}
    outgoing, _ = replies.take(*make_output((A, "a", LENGTH), (A + 1, "b", STOP), started=started))
    message = outgoing[0].message()
    assert (message.ids, message.last) == ([A], [True])
    assert len(replies) == 0


def test_a_step_without_bytes_sends_nothing() -> None:
    replies = Replies(ByteVocabulary())
    outgoing, _ = replies.take(*make_output((A, "a", None), started={A: make_plan()}))
    assert outgoing == {}
    assert len(replies) == 1


def test_a_stop_string_is_told_to_the_engine_once() -> None:
    replies = Replies(ByteVocabulary())
    started = {A: make_plan(stop=["!"])}
    outgoing, stops = replies.take(*make_output((A, "a!", None), started=started))
    assert stops == [Stop(A)]
    assert outgoing[0].message().last == [True]
    assert replies.take(*make_output((A, "more", None))) == ({}, [])


def test_an_aborted_reply_is_forgotten() -> None:
    replies = Replies(ByteVocabulary())
    replies.take(*make_output((A, "a", None), started={A: make_plan()}))
    assert replies.take(*make_output((A, "", ABORT))) == ({}, [])
    assert len(replies) == 0


def test_what_comes_after_an_abort_is_attributed_to_nobody_else() -> None:
    replies = Replies(ByteVocabulary())
    started = {A: make_plan(), B: make_plan()}
    replies.take(*make_output((A, "a", None), (B, "b", None), started=started))
    replies.take(*make_output((A, "", ABORT)))
    outgoing, _ = replies.take(*make_output((A, "xx", None), (B, "c", LENGTH)))
    assert only_choice(outgoing[0].data()) == ("bc", "length")


def test_frames_of_a_request_are_adjacent() -> None:
    frames = Frames()
    head = Head(200, "x")
    for id, data in [(A, b"a1"), (B, b"b"), (A, b"a2")]:
        frames.add(id, head, data, False)
    assert frames.data() == b"a1a2b"
    expected = ResponseFrames({A: head, B: head}, [A, B], [4, 1], [False, False])
    assert frames.message() == expected
