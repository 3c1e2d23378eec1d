"""A conversation as Mistral AI's models were trained on it: as mistral-common writes it.

Its special tokens are ids, so that no text of a message becomes one. What it writes follows the
version of the tokenizer's file. As in vLLM, ids of calls are cut to the nine characters that the
models know.

Imported for such a model only.
"""

import logging
import warnings
from typing import Any

import numpy as np
from mistral_common.exceptions import MistralCommonException
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.validator import ValidationMode
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.image import ImageEncoding
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

from headrace.errors import InvalidValue, ModelError, Unsupported, in_a_line
from headrace.model.mistral_tokenizer import IMAGE_MARKS
from headrace.system.cpu_limit import CpuLimitExceeded
from headrace.tokenizer_proc.encoding.chat_template import (
    ChatTemplate,
    Conversation,
    TemplateTooSlow,
    as_template_message,
)
from headrace.tokenizer_proc.encoding.encoder import panics_as_errors
from headrace.tokenizer_proc.encoding.message_content import parts_of, plain_text
from headrace.tokenizer_proc.jobs.stages import Text, ids_of
from headrace.tokenizer_proc.requests.openai import RequestMessage

CALL_ID, MAX_CALL_ID = "tool_call_id", 9  # characters
ANY_IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}  # only its place is looked at
REFUSALS = (MistralCommonException, AssertionError, ValueError, TypeError, KeyError)
MAX_CHARACTERS = 2 << 20  # of a conversation: a message is encoded in one native call


class MistralTemplate(ChatTemplate):
    """The template of a model whose chats mistral-common writes."""

    def __init__(
        self,
        file: str,
        special_tokens: dict[str, str],
        patience_s: float | None = None,
        takes_images: bool = False,
    ) -> None:
        """Load `file`; `patience_s` is as `ChatTemplate` has it.

        With `takes_images`, a prompt has one token for each image.

        Raises:
            ModelError: mistral-common cannot read the file.
        """
        super().__init__(None, special_tokens, patience_s=patience_s, takes_images=takes_images)
        logging.getLogger("mistral_common").setLevel(logging.WARNING)
        try:
            with warnings.catch_warnings(action="ignore"):  # of what it will no longer have
                self._tokenizer = MistralTokenizer.from_file(file, ValidationMode.test)
        except REFUSALS as error:
            raise ModelError(f"{file}: mistral-common cannot read it: {error}") from error
        if takes_images:
            written: Any = self._tokenizer.instruct_tokenizer
            token = written.tokenizer.get_special_token(IMAGE_MARKS[0])
            written.image_encoder = OneTokenEncoder(token)

    def prompt(self, request: Conversation) -> Text:
        """Return the prompt of a conversation, encoded.

        Raises:
            InvalidValue: mistral-common does not take these messages.
            TemplateTooSlow: it takes too much CPU time for them.
            Unsupported: the request brings a template, or documents.
        """
        variables = request.variables
        self._check(request, variables)
        takes_settings = self._tokenizer.version.supports_model_settings
        effort = variables.get("reasoning_effort") if takes_settings else None
        messages = [self._as_message(one, place) for place, one in enumerate(request.messages)]
        try:
            with self._limit, panics_as_errors(), warnings.catch_warnings(action="ignore"):
                chat = ChatCompletionRequest.from_openai(
                    messages,
                    variables.get("tools"),
                    request.continue_final_message,
                    reasoning_effort=effort,
                )
                ids = self._tokenizer.encode_chat_completion(chat).tokens
        except CpuLimitExceeded as error:
            raise TemplateTooSlow(
                f"messages: mistral-common takes {error} for them", "messages"
            ) from error
        except REFUSALS as error:
            raise InvalidValue(
                "messages: mistral-common refuses them; change their roles, order or fields. It "
                f"says: {in_a_line(error)}",
                "messages",
            ) from error
        text = self._tokenizer.decode(ids, SpecialTokenPolicy.KEEP)
        return Text(text, add_special_tokens=False, ids=ids_of(ids))

    def _check(self, request: Conversation, variables: dict[str, Any]) -> None:
        """Refuse what mistral-common has no place for, as vLLM does."""
        for name, value in (
            ("chat_template", request.chat_template),
            ("documents", variables.get("documents")),
        ):
            if value:
                raise Unsupported(
                    f"{name}: mistral-common writes this model's chats, and has no place for it; "
                    "leave it out",
                    name,
                )
        continues, begins = request.continue_final_message, request.add_generation_prompt
        is_answer = bool(request.messages) and request.messages[-1].role == "assistant"
        if is_answer and not continues and begins is not False:
            raise InvalidValue(
                "messages: the last one is the assistant's; continue it by "
                "'continue_final_message': true",
                "messages",
            )
        size = sum(map(num_characters, request.messages))
        if size > MAX_CHARACTERS:
            raise InvalidValue(
                f"messages: {size} characters are more than {MAX_CHARACTERS} in a conversation "
                "that mistral-common writes; send less",
                "messages",
            )

    def _as_message(self, message: RequestMessage, place: int) -> dict[str, Any]:
        """Return a message as OpenAI has it; parts stay apart."""
        where = f"messages[{place}].content"
        content: Any = None
        if not (self._takes_images and isinstance(message.content, list)):
            content = plain_text(message, where)  # to check it
        if isinstance(message.content, list):
            parts = parts_of(message, where)
            content = [part if part["type"] == "text" else ANY_IMAGE for part in parts]
        fields = as_template_message(message, place, content)
        calls = fields.get("tool_calls", ())
        for named, key in (*((call, "id") for call in calls), (fields, CALL_ID)):
            if key in named:
                named[key] = named[key][-MAX_CALL_ID:]
        return fields


class OneTokenEncoder:
    """In the place of mistral-common's image encoder: writes one token for an image."""

    def __init__(self, token: int) -> None:
        self._encoding = ImageEncoding([token], np.zeros(0))

    def __call__(self, _image: object) -> ImageEncoding:
        return self._encoding


def num_characters(message: RequestMessage) -> int:
    """Return the length of a message's text."""
    if isinstance(message.content, list):
        return sum(len(part.text or "") for part in message.content)
    return len(message.content or "")
