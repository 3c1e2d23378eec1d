"""OpenAI's chat completions and completions: SSE chunks and whole JSON objects.

https://platform.openai.com/docs/api-reference/chat/streaming. Fields that are null in OpenAI's
own responses are null here; those that are absent are absent. Thoughts are `reasoning_content`,
as with DeepSeek and SGLang, and `reasoning`, as with vLLM since 0.16.
"""

from collections.abc import Iterator
from typing import Any

from msgspec import UNSET, UnsetType

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
    Choice,
    Choices,
    Logprobs,
    TokenUsage,
)
from headrace.errors import RequestError
from headrace.ipc.messages import FinishReason, ResponsePlan
from headrace.response_bodies.errors import openai_error
from headrace.response_bodies.openai_completions import (
    ChatCompletionMessage,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    ChatCompletionToolCall,
    CompletionResponse,
    CompletionResponseChoice,
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
    CompletionTokensDetails,
    CustomCallBody,
    DeltaCustomCall,
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    FunctionCallBody,
    PromptTokensDetails,
    UsageInfo,
)
from headrace.sse import DONE, event


def finish_name(finished: FinishReason | None, calls: bool = False) -> str | None:
    """Return a finish reason as clients read it; `calls` is whether tools are called."""
    if finished is FinishReason.STOP and calls:
        return "tool_calls"
    return None if finished is None else finished.name.lower()


def usage_body(usage: TokenUsage) -> UsageInfo:
    """Return the `usage` object."""
    details: CompletionTokensDetails | UnsetType = UNSET
    if usage.num_thought is not None:
        details = CompletionTokensDetails(reasoning_tokens=usage.num_thought)
    return UsageInfo(
        prompt_tokens=usage.num_prompt,
        completion_tokens=usage.num_completion,
        total_tokens=usage.num_prompt + usage.num_completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.num_cached),
        completion_tokens_details=details,
    )


def call_body(call: Call) -> ChatCompletionToolCall:
    """Return an entry of `tool_calls`."""
    if call.is_custom:
        custom = CustomCallBody(name=call.name, input=call.arguments)
        return ChatCompletionToolCall(id=call.id, type="custom", custom=custom)
    return ChatCompletionToolCall(id=call.id, type="function", function=function_body(call))


def function_body(call: Call) -> FunctionCallBody:
    """Return the name and the arguments of a call."""
    return FunctionCallBody(name=call.name, arguments=call.arguments)


def delta_of(piece: Piece) -> DeltaMessage:
    """Return the `delta` of a piece of a chat's answer."""
    match piece:
        case Content(text):
            return DeltaMessage(content=text)
        case Thought(text):
            return DeltaMessage(reasoning_content=text, reasoning=text)  # clients look for either
        case ToolCallStart(index, id, name, is_custom=True):
            custom = DeltaCustomCall(name=name, input="")
            call = DeltaToolCall(index=index, id=id, type="custom", custom=custom)
        case ToolCallStart(index, id, name):
            function = DeltaFunctionCall(name=name, arguments="")
            call = DeltaToolCall(index=index, id=id, type="function", function=function)
        case Arguments(index, text, is_custom=True):
            call = DeltaToolCall(index=index, custom=DeltaCustomCall(input=text))
        case Arguments(index, text):
            call = DeltaToolCall(index=index, function=DeltaFunctionCall(arguments=text))
    return DeltaMessage(tool_calls=[call])


def function_delta(piece: Piece) -> DeltaMessage:
    """Return the same with calls as `function_call`."""
    match piece:
        case ToolCallStart(name=name):
            return DeltaMessage(function_call=DeltaFunctionCall(name=name, arguments=""))
        case Arguments(text=text):
            return DeltaMessage(function_call=DeltaFunctionCall(arguments=text))
        case _:
            return delta_of(piece)


def chat_choice(
    index: int,
    delta: DeltaMessage,
    finish_reason: Any = None,
    logprobs: Any = None,
    token_ids: list[int] | None = None,
) -> ChatCompletionResponseStreamChoice:
    """Return what is new of a choice of a chat. `logprobs` is what a struct of them encodes to."""
    return ChatCompletionResponseStreamChoice(
        index=index,
        delta=delta,
        logprobs=logprobs,
        finish_reason=finish_reason,
        token_ids=given(token_ids),
    )


def text_choice(
    index: int,
    text: str,
    finish_reason: Any = None,
    logprobs: Any = None,
    token_ids: list[int] | None = None,
) -> CompletionResponseStreamChoice:
    """Return what is new of a choice of a completion."""
    return CompletionResponseStreamChoice(
        index=index,
        text=text,
        logprobs=logprobs,
        finish_reason=finish_reason,
        token_ids=given(token_ids),
    )


class OpenAIRenderer:
    """A `Renderer`."""

    def __init__(self, plan: ResponsePlan) -> None:
        self._plan = plan
        self._calling: set[int] = set()  # sequences that have called tools

    @property
    def content_type(self) -> str:
        """The content type of the response."""
        return EVENT_STREAM if self._plan.stream else JSON

    def opening(
        self, index: int, usage: TokenUsage | None = None, prompt_token_ids: list[int] | None = None
    ) -> bytes:
        """Return a sequence's first event: in a chat, the role; the prompt, if requested."""
        if not self._plan.chat:
            if prompt_token_ids is None:
                return b""
            choice = text_choice(index, "")
            choice.prompt_token_ids = prompt_token_ids
            return event(self._text_event([choice], usage))
        begin = chat_choice(index, DeltaMessage(role="assistant", content=""))
        body = self._chat_event([begin], usage)
        if prompt_token_ids is not None:
            body.prompt_token_ids = prompt_token_ids
        return event(body)

    def delta(
        self,
        index: int,
        pieces: list[Piece],
        finished: FinishReason | None,
        logprobs: Logprobs | None = None,
        usage: TokenUsage | None = None,
        token_ids: list[int] | None = None,
        stopped_by: str | int | None = None,
    ) -> bytes:
        """Return the events of new text or tokens, of the end, or of both."""
        if not self._plan.chat:
            text = "".join(piece.text for piece in pieces if isinstance(piece, Content))
            choice = text_choice(index, text, finish_name(finished), logprobs, token_ids)
            return event(self._text_event([choice], usage))
        if not pieces and (logprobs is not None or token_ids):
            pieces = [Content("")]
        choices = []
        for piece in pieces:
            if isinstance(piece, ToolCallStart):
                self._calling.add(index)
            delta = function_delta(piece) if self._plan.function_call else delta_of(piece)
            choices.append(chat_choice(index, delta, None, logprobs, token_ids))
            logprobs = None  # reported once
            token_ids = None if token_ids is None else []
        if finished is not None:
            end = self._finish_name(finished, index in self._calling)
            choices.append(chat_choice(index, DeltaMessage(), end))
        return b"".join(event(self._chat_event([choice], usage)) for choice in choices)

    def _finish_name(self, finished: FinishReason, calls: bool) -> str | None:
        """Return why a chat's answer ends; `calls` is whether it calls something."""
        name = finish_name(finished, calls)
        return "function_call" if name == "tool_calls" and self._plan.function_call else name

    def closing(self, usage: TokenUsage) -> bytes:
        """Return the last events of a stream."""
        if not self._plan.include_usage:
            return DONE
        body = self._chat_event([], usage) if self._plan.chat else self._text_event([], usage)
        return event(body) + DONE

    def failure(self, error: RequestError) -> bytes:
        """Return the last events of a stream that fails."""
        return event(openai_error(error)) + DONE

    def _chat_event(
        self, choices: list[ChatCompletionResponseStreamChoice], usage: TokenUsage | None
    ) -> ChatCompletionStreamResponse:
        plan = self._plan
        return ChatCompletionStreamResponse(
            id=plan.response_id,
            object="chat.completion.chunk",
            created=plan.created,
            model=plan.model,
            system_fingerprint=None,
            choices=choices,
            usage=self._event_usage(usage),
        )

    def _text_event(
        self, choices: list[CompletionResponseStreamChoice], usage: TokenUsage | None
    ) -> CompletionStreamResponse:
        plan = self._plan
        return CompletionStreamResponse(
            id=plan.response_id,
            object="text_completion",
            created=plan.created,
            model=plan.model,
            system_fingerprint=None,
            choices=choices,
            usage=self._event_usage(usage),
        )

    def _event_usage(self, usage: TokenUsage | None) -> UsageInfo | UnsetType | None:
        """Return the `usage` of an event, which is null until the last unless each has it."""
        if not self._plan.include_usage:
            return UNSET
        return None if usage is None else usage_body(usage)

    def whole(self, choices: Choices, usage: TokenUsage) -> Iterator[bytes]:
        """Return the body of an answer that does not stream, in slices.

        vLLM's `prompt_logprobs` and `prompt_token_ids` belong to the choice in a completion, to
        the body in a chat.
        """
        form = self._whole_chat_choice if self._plan.chat else self._whole_text_choice
        rendered: Any = LazyList(
            range(len(choices)), lambda index: form(index, choices[index]), True
        )
        plan = self._plan
        if not plan.chat:
            return slices(
                CompletionResponse(
                    id=plan.response_id,
                    object="text_completion",
                    created=plan.created,
                    model=plan.model,
                    system_fingerprint=None,
                    choices=rendered,
                    usage=usage_body(usage),
                )
            )
        return slices(
            ChatCompletionResponse(
                id=plan.response_id,
                object="chat.completion",
                created=plan.created,
                model=plan.model,
                system_fingerprint=None,
                choices=rendered,
                usage=usage_body(usage),
                prompt_logprobs=given(choices[0].prompt_logprobs),
                prompt_token_ids=given(choices[0].prompt_token_ids),
            )
        )

    def _whole_chat_choice(self, index: int, choice: Choice) -> ChatCompletionResponseChoice:
        finish_reason: Any = self._finish_name(choice.finished, bool(choice.calls))
        logprobs: Any = choice.logprobs
        return ChatCompletionResponseChoice(
            index=index,
            message=message_body(choice, self._plan.function_call),
            logprobs=logprobs,
            finish_reason=finish_reason,
            token_ids=given(choice.token_ids),
        )

    def _whole_text_choice(self, index: int, choice: Choice) -> CompletionResponseChoice:
        finish_reason: Any = finish_name(choice.finished)
        logprobs: Any = choice.logprobs
        return CompletionResponseChoice(
            index=index,
            text=choice.text,
            logprobs=logprobs,
            finish_reason=finish_reason,
            token_ids=given(choice.token_ids),
            prompt_logprobs=given(choice.prompt_logprobs),
            prompt_token_ids=given(choice.prompt_token_ids),
        )


def given(value: Any) -> Any:
    """Return a value of a field that is absent rather than null."""
    return UNSET if value is None else value


def message_body(choice: Choice, function_call: bool = False) -> ChatCompletionMessage:
    """Return the `message` of a chat's choice; `function_call` selects the legacy form of calls."""
    thought = choice.thought or UNSET
    message = ChatCompletionMessage(
        role="assistant",
        content=choice.text or (None if choice.calls else ""),
        refusal=None,
        reasoning_content=thought,
        reasoning=thought,
    )
    if choice.calls and function_call:
        message.function_call = function_body(choice.calls[0])
    elif choice.calls:
        message.tool_calls = [call_body(call) for call in choice.calls]
    return message
