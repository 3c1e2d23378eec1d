"""OpenAI's response bodies: SSE chunks and whole JSON objects.

https://platform.openai.com/docs/api-reference/chat/streaming. Fields that are null in OpenAI's
own responses are null here; those that are absent are absent.
"""

from typing import Any, NamedTuple

import msgspec

from headrace.messages import FinishReason, ReplyPlan

EVENT_STREAM = "text/event-stream; charset=utf-8"
JSON = "application/json"
DONE = b"data: [DONE]\n\n"

Object = dict[str, Any]


def finish_name(finished: FinishReason | None) -> str | None:
    """Return a finish reason as clients read it."""
    return None if finished is None else finished.name.lower()


class Usage(NamedTuple):
    """How many tokens a request took."""

    num_prompt: int
    num_completion: int
    num_cached: int  # of the prompt, found in the prefix cache

    def body(self) -> Object:
        """Return the `usage` object."""
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_completion,
            "total_tokens": self.num_prompt + self.num_completion,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }


def event(body: Object) -> bytes:
    """Return one server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class Choice(NamedTuple):
    """A whole answer, one of `n`."""

    text: str
    finished: FinishReason
    logprobs: Object | None = None
    prompt_logprobs: list[Object | None] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Renderer:
    """Renders one reply, whose sequences share a plan but for their index."""

    def __init__(self, plan: ReplyPlan) -> None:
        self._plan = plan

    @property
    def content_type(self) -> str:
        """The content type of the response."""
        return EVENT_STREAM if self._plan.stream else JSON

    def opening(
        self, index: int, usage: Usage | None = None, prompt_token_ids: list[int] | None = None
    ) -> bytes:
        """Return a sequence's first event: in a chat, the role; the prompt, where it is told."""
        plan = self._plan
        if not plan.chat and prompt_token_ids is None:
            return b""
        content = {"role": "assistant", "content": ""} if plan.chat else ""
        choice = self._piece(index, content, None, None, None)
        owner = body = self._body([choice], usage)
        if not plan.chat:
            owner = choice
        if prompt_token_ids is not None:
            owner["prompt_token_ids"] = prompt_token_ids
        return event(body)

    def delta(
        self,
        index: int,
        text: str,
        finished: FinishReason | None,
        logprobs: Object | None = None,
        usage: Usage | None = None,
        token_ids: list[int] | None = None,
    ) -> bytes:
        """Return the events of new text or tokens, of the end, or of both."""
        if not self._plan.chat:
            piece = self._piece(index, text, finished, logprobs, token_ids)
            return event(self._body([piece], usage))
        pieces = []
        if text or logprobs is not None or token_ids:
            pieces.append(self._piece(index, {"content": text}, None, logprobs, token_ids))
        if finished is not None:
            pieces.append(self._piece(index, {}, finished, None, None))
        return b"".join(event(self._body([piece], usage)) for piece in pieces)

    def _piece(
        self,
        index: int,
        content: Object | str,
        finished: FinishReason | None,
        logprobs: Object | None,
        token_ids: list[int] | None,
    ) -> Object:
        """Return a choice with what is new of it."""
        choice: Object = {"index": index, "delta" if self._plan.chat else "text": content}
        choice |= {"logprobs": logprobs, "finish_reason": finish_name(finished)}
        if token_ids is not None:
            choice["token_ids"] = token_ids
        return choice

    def closing(self, usage: Usage) -> bytes:
        """Return the last events of a stream."""
        if not self._plan.include_usage:
            return DONE
        return event(self._body([], usage)) + DONE

    def _body(self, choices: list[Object], usage: Usage | None) -> Object:
        kind = "chat.completion.chunk" if self._plan.chat else "text_completion"
        body: Object = self._identity(kind) | {"choices": choices}
        if self._plan.include_usage:
            body["usage"] = None if usage is None else usage.body()
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

    def whole(self, answers: list[Choice], usage: Usage) -> bytes:
        """Return the body of an answer that does not stream.

        vLLM's `prompt_logprobs` and `prompt_token_ids` belong to the choice in a completion, to
        the body in a chat.
        """
        choices = []
        for index, answer in enumerate(answers):
            content: Object = {"text": answer.text}
            if self._plan.chat:
                content = {
                    "message": {"role": "assistant", "content": answer.text, "refusal": None}
                }
            end: Object = {
                "logprobs": answer.logprobs,
                "finish_reason": finish_name(answer.finished),
            }
            if answer.token_ids is not None:
                end["token_ids"] = answer.token_ids
            if not self._plan.chat:
                end |= of_prompt(answer)
            choices.append({"index": index} | content | end)
        kind = "chat.completion" if self._plan.chat else "text_completion"
        body = self._identity(kind) | {"choices": choices, "usage": usage.body()}
        if self._plan.chat:
            body |= of_prompt(answers[0])
        return msgspec.json.encode(body)


def of_prompt(answer: Choice) -> Object:
    """Return what is told of an answer's prompt."""
    told = {"prompt_logprobs": answer.prompt_logprobs, "prompt_token_ids": answer.prompt_token_ids}
    return {name: value for name, value in told.items() if value is not None}
