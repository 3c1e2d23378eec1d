"""Requests of `Engine` and `AsyncEngine` to the ring, and results made of its answers."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from tqdm import tqdm

from headrace.client.responses import (
    ChatMessage,
    Completion,
    EmbeddingList,
    Messages,
    TextChoice,
    Usage,
    chat_body,
    embedding_body,
)
from headrace.offline.ring_connection import RingRequest
from headrace.offline.sampling_params import SamplingParams
from headrace.routes import CHAT, COMPLETIONS, EMBEDDINGS

TextOrIds = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams] | None
Vectors = np.ndarray[tuple[int, int], np.dtype[np.float32]]


class RequestOutput(msgspec.Struct):
    """The result of one prompt: `n` outputs, each with `text` and `finish_reason`."""

    request_id: str
    prompt: TextOrIds
    outputs: list[TextChoice]
    usage: Usage

    @property
    def text(self) -> str:
        """The first output's text."""
        return self.outputs[0].text


def prompt_list(prompts: TextOrIds | Sequence[TextOrIds]) -> list[TextOrIds]:
    """Return one prompt or several, each text or token ids, as a list."""
    match prompts:
        case str() | [int(), *_]:  # what starts with an id is all ids
            return [prompts]  # type: ignore[list-item]
    return several(prompts, "a prompt is a text or a list of token ids")


def conversation_list(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """Return a list of conversations from one or several. Each is messages, or a user message."""
    match messages:
        case str() | [dict() | ChatMessage(), *_]:
            return [messages]  # type: ignore[list-item]
    return several(messages, "a conversation is a text or a list of messages")


def several(items: Any, what: str) -> list[Any]:
    """Return a list of texts or lists, checked.

    Raises:
        TypeError: it is none, or something else is in it. `what` says what it should be.
    """
    match items:
        case [*found]:
            others = [item for item in found if not isinstance(item, str | list | tuple)]
        case _:
            others = [items]
    if others:
        raise TypeError(f"{what}, not {type(others[0]).__name__}; give a list for several")
    return list(items)


def params_list(params: Params, num_prompts: int) -> list[SamplingParams]:
    """Return the parameters of each prompt; one may do for all."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if not isinstance(params, list | tuple):
        raise not_params(params)
    if len(params) != num_prompts:
        raise ValueError(
            f"{len(params)} sampling_params for {num_prompts} prompts; give one for each, or one "
            "for all"
        )
    return list(params)


def call_of(
    path: str, body: dict[str, Any], params: SamplingParams | None, options: dict[str, Any]
) -> RingRequest:
    """Return the request of one prompt. Options go before parameters."""
    if not isinstance(params, SamplingParams | None):
        raise not_params(params)
    fields = {} if params is None else msgspec.to_builtins(params)
    fields |= options
    n = fields.get("n")
    num_sequences = n if isinstance(n, int) and n > 0 else 1  # the server refuses what is not
    return RingRequest(path, msgspec.json.encode(fields | body), num_sequences)


def not_params(params: object) -> TypeError:
    """The error for a value that is no parameters."""
    name = type(params).__name__
    return TypeError(f"sampling_params must be SamplingParams, or a list of them, not {name}")


def completion_calls(
    prompts: list[TextOrIds], params: Params, options: dict[str, Any]
) -> Iterator[RingRequest]:
    """Return the request of each prompt."""
    return (
        call_of(COMPLETIONS, {"prompt": prompt, "stream": False}, p, options)
        for prompt, p in zip(prompts, params_list(params, len(prompts)), strict=True)
    )


def chat_calls(
    conversations: list[Messages], params: Params, options: dict[str, Any]
) -> Iterator[RingRequest]:
    """Return the request of each conversation."""
    return (
        call_of(CHAT, chat_body(messages, {"stream": False}), p, options)
        for messages, p in zip(conversations, params_list(params, len(conversations)), strict=True)
    )


def stream_call(
    prompt: TextOrIds, params: SamplingParams | None, options: dict[str, Any]
) -> RingRequest:
    """Return the request of a prompt whose continuation is wanted as it comes."""
    listed = prompt_list(prompt)
    if len(listed) != 1:
        raise TypeError(f"a stream takes one prompt, not {len(listed)}; use generate for several")
    return call_of(COMPLETIONS, {"prompt": listed[0], "stream": True}, params, options)


def embedding_calls(texts: list[TextOrIds], options: dict[str, Any]) -> Iterator[RingRequest]:
    """Return the request of each text."""
    return (call_of(EMBEDDINGS, embedding_body(text, {}), None, options) for text in texts)


def request_outputs(prompts: list[TextOrIds], answers: list[Completion]) -> list[RequestOutput]:
    """Return the answers with their prompts."""
    return [
        RequestOutput(answer.id, prompt, answer.choices, answer.usage or Usage(0, 0))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def stack(answers: list[EmbeddingList]) -> Vectors:
    """Return the vectors of all answers, f32 [texts, dimensions]."""
    rows = [np.frombuffer(answer.data[0].embedding, "<f4") for answer in answers]
    return np.stack(rows) if rows else np.empty((0, 0), np.float32)


class Bar:
    """Prompts done, and tokens per second: generated ones, or read where none are generated."""

    def __init__(self, total: int, is_shown: bool) -> None:
        self._tqdm = tqdm(total=total, unit="prompt", disable=not is_shown)
        self._num_tokens = 0

    def add(self, usage: Usage | None) -> None:
        """Count one prompt."""
        if usage is not None:
            self._num_tokens += usage.completion_tokens or usage.prompt_tokens
        elapsed_s = self._tqdm.format_dict["elapsed"]
        if elapsed_s:
            self._tqdm.set_postfix_str(f"{self._num_tokens / elapsed_s:.0f} tokens/s", False)
        self._tqdm.update()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._tqdm.close()
