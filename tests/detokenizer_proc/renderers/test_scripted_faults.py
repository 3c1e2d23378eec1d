"""A scripted fault is at the end of a response, in each API, and nowhere before."""

import json
from typing import Any

import pytest
from byte_responses import RESPONSES_FORM, make_plan

from headrace.detokenizer_proc.inflight_responses import is_plain
from headrace.detokenizer_proc.parsers.pieces import Content
from headrace.detokenizer_proc.renderers.renderer import Choice, TokenUsage
from headrace.detokenizer_proc.renderers.renderer_selection import renderer_of
from headrace.ipc.messages import Api, FaultKind, FinishReason, ResponseFault

USAGE = TokenUsage(num_prompt=9, num_completion=4, num_cached=0)
FORMS = {Api.RESPONSES: RESPONSES_FORM}
APIS = (Api.CHAT, Api.COMPLETION, Api.RESPONSES, Api.MESSAGES)


def streamed(api: Api, fault: ResponseFault | None) -> bytes:
    """Return a stream of two words."""
    fields: dict[str, Any] = {"continuous_usage": api is Api.MESSAGES, "form": FORMS.get(api)}
    renderer = renderer_of(make_plan(api=api, stream=True, fault=fault, **fields))
    usage = USAGE if api is Api.MESSAGES else None
    data = renderer.opening(0, usage) + renderer.delta(0, [Content("One")], None, None, usage)
    data += renderer.delta(0, [Content(" two")], FinishReason.STOP, None, usage)
    return data + renderer.closing(USAGE)


def texts(data: bytes) -> list[Any]:
    """Return the data of each event, decoded; None is what is not JSON."""
    found: list[Any] = []
    for event in data.decode().split("\n\n"):
        if "data: " in event:
            try:
                found.append(json.loads(event[event.index("data: ") + 6 :]))
            except ValueError:
                found.append(None)
    return found


@pytest.mark.parametrize("api", APIS)
def test_error_ends_a_stream(api: Api) -> None:
    fault = ResponseFault(FaultKind.ERROR, 529, "too much", "overloaded_error")
    data = streamed(api, fault)
    assert b"One" in data
    assert b" two" in data
    *_, last = (event for event in texts(data) if event is not None)
    assert "too much" in json.dumps(last)


@pytest.mark.parametrize("api", APIS)
def test_cut_stream_ends_in_an_event(api: Api) -> None:
    data = streamed(api, ResponseFault(FaultKind.CUT))
    assert b" two" in data
    assert not data.endswith(b"\n\n")
    assert texts(data).count(None) <= 1


@pytest.mark.parametrize("api", APIS)
def test_one_event_of_a_stream_is_no_json(api: Api) -> None:
    correct, data = streamed(api, None), streamed(api, ResponseFault(FaultKind.JSON))
    assert texts(data).count(None) == texts(correct).count(None) + 1
    assert data.endswith(b"\n\n")


@pytest.mark.parametrize("api", APIS)
def test_stream_without_its_end_lacks_the_last_events(api: Api) -> None:
    correct, data = streamed(api, None), streamed(api, ResponseFault(FaultKind.NO_END))
    assert len(data) < len(correct)
    assert len(texts(data)) < len(texts(correct)) or b"[DONE]" not in data


@pytest.mark.parametrize("kind", [FaultKind.CUT, FaultKind.JSON])
def test_whole_body_is_half(kind: FaultKind) -> None:
    answers = [Choice("One two", FinishReason.STOP)]
    correct = b"".join(renderer_of(make_plan(api=Api.CHAT)).whole(answers, USAGE))
    faulty = renderer_of(make_plan(api=Api.CHAT, fault=ResponseFault(kind)))
    assert b"".join(faulty.whole(answers, USAGE)) == correct[: len(correct) // 2]


def test_wrong_content_type_is_html() -> None:
    fault = ResponseFault(FaultKind.CONTENT_TYPE)
    assert renderer_of(make_plan(fault=fault)).content_type.startswith("text/html")
    assert streamed(Api.CHAT, fault) == streamed(Api.CHAT, None)


def test_faulty_response_is_not_written_by_the_core() -> None:
    assert is_plain(make_plan(api=Api.CHAT))
    assert not is_plain(make_plan(api=Api.CHAT, fault=ResponseFault(FaultKind.CUT)))
