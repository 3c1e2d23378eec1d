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


class Renderer:
    """Renders one reply, whose sequences share a plan but for their index."""

    def __init__(self, plan: ReplyPlan) -> None:
        self._plan = plan

    @property
    def content_type(self) -> str:
        """The content type of the response."""
        return EVENT_STREAM if self._plan.stream else JSON

    def opening(self, index: int, usage: Usage | None = None) -> bytes:
        """Return a sequence's first event: in a chat, the role."""
        if not self._plan.chat:
            return b""
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None, usage)

    def delta(
        self,
        index: int,
        text: str,
        finished: FinishReason | None,
        logprobs: Object | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        """Return the events of new text, of the end, or of both."""
        if not self._plan.chat:
            return self._chunk(index, text, finished, logprobs, usage)
        events = b""
        if text or logprobs is not None:
            events = self._chunk(index, {"content": text}, None, logprobs, usage)
        if finished is not None:
            events += self._chunk(index, {}, finished, None, usage)
        return events

    def _chunk(
        self,
        index: int,
        content: Object | str,
        finished: FinishReason | None,
        logprobs: Object | None,
        usage: Usage | None,
    ) -> bytes:
        choice: Object = {"index": index, "delta" if self._plan.chat else "text": content}
        choice |= {"logprobs": logprobs, "finish_reason": finish_name(finished)}
        return event(self._body([choice], usage))

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

        vLLM's `prompt_logprobs` belong to the choice in a completion, to the body in a chat.
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
            if answer.prompt_logprobs is not None and not self._plan.chat:
                end["prompt_logprobs"] = answer.prompt_logprobs
            choices.append({"index": index} | content | end)
        kind = "chat.completion" if self._plan.chat else "text_completion"
        body = self._identity(kind) | {"choices": choices, "usage": usage.body()}
        if answers[0].prompt_logprobs is not None and self._plan.chat:
            body["prompt_logprobs"] = answers[0].prompt_logprobs
        return msgspec.json.encode(body)
