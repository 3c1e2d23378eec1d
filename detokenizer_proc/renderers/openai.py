"""OpenAI's chat completions and completions: SSE chunks and whole JSON objects.

https://platform.openai.com/docs/api-reference/chat/streaming. Fields that are null in OpenAI's
own responses are null here; those that are absent are absent. Thoughts are `reasoning_content`,
as with DeepSeek and SGLang, and `reasoning`, as with vLLM since 0.16.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import UNSET

from headrace.detokenizer_proc.parsers.pieces import (
    Arguments,
    Call,
    Content,
    Piece,
    Thought,
    ToolCallStart,
)
from headrace.detokenizer_proc.renderers.json_slices import LazyList, slices
from headrace.detokenizer_proc.renderers.renderer import (
    EVENT_STREAM,
    JSON,
    Answers,
    Choice,
    Object,
    TokenUsage,
)
from headrace.errors import RequestError
from headrace.ipc.messages import FinishReason, ReplyPlan
from headrace.protocol.openai_chunks import (
    ChatEventChoice,
    TextEventChoice,
    ToldCall,
    ToldDelta,
    ToldFunction,
    ToldInput,
)
from headrace.protocol.sse import DONE, event


def finish_name(finished: FinishReason | None, calls: bool = False) -> str | None:
    """Return a finish reason as clients read it; `calls` is whether tools are called."""
    if finished is FinishReason.STOP and calls:
        return "tool_calls"
    return None if finished is None else finished.name.lower()


def usage_body(usage: TokenUsage) -> Object:
    """Return the `usage` object."""
    body: Object = {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_completion,
        "total_tokens": usage.num_prompt + usage.num_completion,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached},
    }
    if usage.num_thought is not None:
        body["completion_tokens_details"] = {"reasoning_tokens": usage.num_thought}
    return body


def call_body(call: Call) -> Object:
    """Return an entry of `tool_calls`."""
    if call.is_custom:
        custom = {"name": call.name, "input": call.arguments}
        return {"id": call.id, "type": "custom", "custom": custom}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def thought_body(text: str) -> Object:
    """Return the fields of thoughts: clients look for either."""
    return {"reasoning_content": text, "reasoning": text}


def delta_of(piece: Piece) -> ToldDelta:
    """Return the `delta` of a piece of a chat's answer."""
    match piece:
        case Content(text):
            return ToldDelta(content=text)
        case Thought(text):
            return ToldDelta(reasoning_content=text, reasoning=text)  # clients look for either
        case ToolCallStart(index, id, name, is_custom=True):
            custom = ToldInput(name=name, input="")
            call = ToldCall(index=index, id=id, type="custom", custom=custom)
        case ToolCallStart(index, id, name):
            function = ToldFunction(name=name, arguments="")
            call = ToldCall(index=index, id=id, type="function", function=function)
        case Arguments(index, text, is_custom=True):
            call = ToldCall(index=index, custom=ToldInput(input=text))
        case Arguments(index, text):
            call = ToldCall(index=index, function=ToldFunction(arguments=text))
    return ToldDelta(tool_calls=[call])


def function_delta(piece: Piece) -> ToldDelta:
    """Return the same where calls are told as `function_call`."""
    match piece:
        case ToolCallStart(name=name):
            return ToldDelta(function_call=ToldFunction(name=name, arguments=""))
        case Arguments(text=text):
            return ToldDelta(function_call=ToldFunction(arguments=text))
        case _:
            return delta_of(piece)


def chat_choice(
    index: int,
    delta: ToldDelta,
    finish_reason: Any = None,
    logprobs: Any = None,
    token_ids: list[int] | None = None,
) -> ChatEventChoice:
    """Return what is new of a choice of a chat. `logprobs` is what a struct of them encodes to."""
    return ChatEventChoice(
        index=index,
        delta=delta,
        logprobs=logprobs,
        finish_reason=finish_reason,
        token_ids=UNSET if token_ids is None else token_ids,
    )


def text_choice(
    index: int,
    text: str,
    finish_reason: Any = None,
    logprobs: Any = None,
    token_ids: list[int] | None = None,
) -> TextEventChoice:
    """Return what is new of a choice of a completion."""
    return TextEventChoice(
        index=index,
        text=text,
        logprobs=logprobs,
        finish_reason=finish_reason,
        token_ids=UNSET if token_ids is None else token_ids,
    )


class OpenAIRenderer:
    """A `Renderer`."""

    def __init__(self, plan: ReplyPlan) -> None:
        self._plan = plan
        self._calling: set[int] = set()  # sequences that have called tools

    @property
    def content_type(self) -> str:
        """The content type of the response."""
        return EVENT_STREAM if self._plan.stream else JSON

    def opening(
        self, index: int, usage: TokenUsage | None = None, prompt_token_ids: list[int] | None = None
    ) -> bytes:
        """Return a sequence's first event: in a chat, the role; the prompt, where it is told."""
        if not self._plan.chat:
            if prompt_token_ids is None:
                return b""
            choice = text_choice(index, "")
            choice.prompt_token_ids = prompt_token_ids
            return event(self._body([choice], usage))
        begin = chat_choice(index, ToldDelta(role="assistant", content=""))
        body = self._body([begin], usage)
        if prompt_token_ids is not None:
            body["prompt_token_ids"] = prompt_token_ids
        return event(body)

    def delta(
        self,
        index: int,
        pieces: list[Piece],
        finished: FinishReason | None,
        logprobs: Object | None = None,
        usage: TokenUsage | None = None,
        token_ids: list[int] | None = None,
        stopped_by: str | int | None = None,
    ) -> bytes:
        """Return the events of new text or tokens, of the end, or of both."""
        if not self._plan.chat:
            text = "".join(piece.text for piece in pieces if isinstance(piece, Content))
            choice = text_choice(index, text, finish_name(finished), logprobs, token_ids)
            return event(self._body([choice], usage))
        if not pieces and (logprobs is not None or token_ids):
            pieces = [Content("")]
        choices = []
        for piece in pieces:
            if isinstance(piece, ToolCallStart):
                self._calling.add(index)
            delta = function_delta(piece) if self._plan.function_call else delta_of(piece)
            choices.append(chat_choice(index, delta, None, logprobs, token_ids))
            logprobs = None  # told once
            token_ids = None if token_ids is None else []
        if finished is not None:
            end = self._finish_name(finished, index in self._calling)
            choices.append(chat_choice(index, ToldDelta(), end))
        return b"".join(event(self._body([choice], usage)) for choice in choices)

    def _finish_name(self, finished: FinishReason, calls: bool) -> str | None:
        """Return why a chat's answer ends; `calls` is whether it calls something."""
        name = finish_name(finished, calls)
        return "function_call" if name == "tool_calls" and self._plan.function_call else name

    def closing(self, usage: TokenUsage) -> bytes:
        """Return the last events of a stream."""
        if not self._plan.include_usage:
            return DONE
        return event(self._body([], usage)) + DONE

    def failure(self, error: RequestError) -> bytes:
        """Return the last events of a stream that fails."""
        return event(error.body()) + DONE

    def _body(
        self, choices: Sequence[ChatEventChoice | TextEventChoice], usage: TokenUsage | None
    ) -> Object:
        kind = "chat.completion.chunk" if self._plan.chat else "text_completion"
        body: Object = self._identity(kind) | {"choices": choices}
        if self._plan.include_usage:
            body["usage"] = None if usage is None else usage_body(usage)
        return body

    def _identity(self, kind: str) -> Object:
        plan = self._plan
        return {
            "id": plan.response_id,
            "object": kind,
            "created": plan.created,
            "model": plan.model,
            "system_fingerprint": None,
        }

    def whole(self, answers: Answers, usage: TokenUsage) -> Iterator[bytes]:
        """Return the body of an answer that does not stream, in slices.

        vLLM's `prompt_logprobs` and `prompt_token_ids` belong to the choice in a completion, to
        the body in a chat.
        """
        choices = LazyList(
            range(len(answers)), lambda index: self._whole_choice(index, answers[index]), True
        )
        kind = "chat.completion" if self._plan.chat else "text_completion"
        body = self._identity(kind) | {"choices": choices, "usage": usage_body(usage)}
        if self._plan.chat:
            body |= of_prompt(answers[0])
        return slices(body)

    def _whole_choice(self, index: int, answer: Choice) -> Object:
        content: Object = {"text": answer.text}
        if self._plan.chat:
            content = {"message": message_body(answer, self._plan.function_call)}
        end: Object = {
            "logprobs": answer.logprobs,
            "finish_reason": self._finish_name(answer.finished, bool(answer.calls)),
        }
        if answer.token_ids is not None:
            end["token_ids"] = answer.token_ids
        if not self._plan.chat:
            end |= of_prompt(answer)
        return {"index": index} | content | end


def message_body(answer: Choice, function_call: bool = False) -> Object:
    """Return the `message` of a chat's choice; `function_call` selects the legacy form of calls."""
    content = answer.text or (None if answer.calls else "")
    message: Object = {"role": "assistant", "content": content, "refusal": None}
    if answer.thought:
        message |= thought_body(answer.thought)
    if answer.calls and function_call:
        message["function_call"] = call_body(answer.calls[0])["function"]
    elif answer.calls:
        message["tool_calls"] = [call_body(call) for call in answer.calls]
    return message


def of_prompt(answer: Choice) -> Object:
    """Return the response fields about the prompt."""
    told = {"prompt_logprobs": answer.prompt_logprobs, "prompt_token_ids": answer.prompt_token_ids}
    return {name: value for name, value in told.items() if value is not None}
