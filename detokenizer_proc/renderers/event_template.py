"""A sequence's events but for their text, so that the core can write them.

A template has six parts: the opening, what precedes and follows a text in its event, the ends for
stop and length, and the closing. An end is an event of its own in chats, else it follows the last
text. `SEPARATOR` is between the parts.

What differs from request to request is an id and a time: the rest is rendered once.
"""

import functools

from headrace.detokenizer_proc.parsers.pieces import Content
from headrace.detokenizer_proc.renderers.openai import OpenAIRenderer
from headrace.ipc.messages import Api, FinishReason, ResponsePlan
from headrace.sse import DONE

TEXT = "\x01"  # renders as no other text does
ID = "\x02"
CREATED = 9_007_199_254_740_991
SEPARATOR = b"\0"  # in no JSON
TEXT_JSON, ID_JSON, CREATED_JSON = b'"\\u0001"', b"\\u0002", str(CREATED).encode()
NOTHING = SEPARATOR * 5  # six empty parts


@functools.lru_cache(maxsize=1024)
def pattern(model: str, api: Api, include_usage: bool, index: int) -> bytes:
    """Return the template of all requests of a kind, with `ID` and `CREATED` for theirs."""
    plan = ResponsePlan(
        response_id=ID,
        model=model,
        created=CREATED,
        api=api,
        stream=True,
        include_usage=include_usage,
        num_sequences=1,
        num_prompt_tokens=1,
        index=index,
        stop=[],
        include_stop=False,
        skip_special_tokens=True,
    )
    renderer = OpenAIRenderer(plan)
    prefix, tail = renderer.delta(index, [Content(TEXT)], None).split(TEXT_JSON)
    ends = [
        renderer.delta(index, [], reason)
        if api is Api.CHAT
        else renderer.delta(index, [Content(TEXT)], reason).split(TEXT_JSON)[1]
        for reason in (FinishReason.STOP, FinishReason.LENGTH)
    ]
    return SEPARATOR.join((renderer.opening(index), prefix, tail, *ends, DONE))


def template_of(plan: ResponsePlan) -> bytes:
    """Return the template of a sequence; one that does not stream has no events."""
    if not plan.stream:
        return NOTHING
    response_id, created = plan.response_id.encode(), str(plan.created).encode()
    kind = pattern(plan.model, plan.api, plan.include_usage, plan.index)
    template = kind.replace(ID_JSON, response_id).replace(CREATED_JSON, created)
    if not plan.echo:
        return template
    echo = OpenAIRenderer(plan).delta(plan.index, [Content(plan.echo)], None)
    return template.replace(SEPARATOR, echo + SEPARATOR, 1)
