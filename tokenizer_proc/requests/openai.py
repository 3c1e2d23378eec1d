"""OpenAI's request bodies as structs, and their validation.

msgspec decodes and checks types in one pass; unknown fields are ignored, as OpenAI's servers do.
Fields of OpenAI's that this server does not act on are refused when they ask for something,
never dropped in silence. https://platform.openai.com/docs/api-reference
"""

import logging
import re
from array import array
from collections.abc import Collection, Sequence
from typing import Any, Literal

import msgspec

from headrace.errors import BAD_JSON, InvalidBody, InvalidValue, Unsupported
from headrace.ipc.messages import MAX_LOGPROBS
from headrace.tokenizer_proc.requests.constraints import JsonSchemaFormat
from headrace.tokenizer_proc.requests.custom_tools import CustomTool
from headrace.tokenizer_proc.requests.field_names import as_written, refuse
from headrace.tokenizer_proc.requests.function_calls import NAMES as FUNCTION_NAMES
from headrace.tokenizer_proc.requests.function_calls import take_called, take_functions
from headrace.tokenizer_proc.requests.sampling import SamplingFields, check_ranges, check_sampling
from headrace.tokenizer_proc.requests.text_files import FileData, text_of_file
from headrace.tokenizer_proc.requests.tool_choices import FunctionName
from headrace.tokenizer_proc.requests.tools import (
    CalledFunction,
    CalledTool,
    Function,
    Tool,
    ToolFields,
    as_function,
    check_offered,
    check_tools,
)
from headrace.tokenizer_proc.requests.validation_errors import (
    MAX_LOGGED,
    REQUIRED,
    fault_of,
    syntax_fault,
)
from headrace.tokenizer_proc.requests.videos import MediaOptions, VideoUrl

log = logging.getLogger(__name__)

COMPLETION_MAX_TOKENS = 16  # OpenAI's default on /v1/completions
MAX_EMBEDDING_INPUTS = 2048  # as with OpenAI
IMAGE_PART, VIDEO_PART, FILE_PART = "image_url", "video_url", "file"
UNSUPPORTED = ("audio", "echo", "moderation", "web_search_options")  # of chats
# Of chats, taken unread: they change no answer.
NOT_READ = (
    "metadata",
    "prediction",
    "safety_identifier",
    "service_tier",
    "store",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
)
# Half of a pair such as \ud83d\ude00 without the other, or written in UTF-8.
LONE_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*"
    rb"(?:\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|\xed[\xa0-\xbf]"
)
# Of msgspec, that a number is written with a point or an exponent where an integer is accepted.
FLOAT_FOR_INT = re.compile(r"Expected `(?:[a-z]+ \| )*int(?: \| [a-z]+)*`, got `float`")
MAX_EXACT = 1 << 53  # an integer above may have been another before it was a double
MAX_FLOATS_BYTES = 1 << 20  # of a body that is decoded again: Python's objects take much memory
MAX_ID_BITS = 63
NUMBERS_BYTES = 1 << 18  # of JSON, decoded at once


class TextPart(msgspec.Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None


class ImageUrl(msgspec.Struct):
    """The URL of an image, and its detail."""

    url: str
    detail: str = "auto"


class ContentPart(TextPart):
    """The same of a chat, where it may be an image, frames of a video, or a file of text."""

    image_url: ImageUrl | None = None
    video_url: VideoUrl | None = None
    file: FileData | None = None


def text_of(
    content: str | Sequence[TextPart], where: str, types: Collection[str] = ("text",)
) -> str:
    """Return the text of a message, its parts on lines of their own."""
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in types:
            raise Unsupported(f"{where}: this model takes text, not '{part.type}' parts", where)
        if part.text is None:
            raise InvalidValue(f"{where}: a text part needs 'text'", where)
    return "\n".join(part.text or "" for part in content)


class RequestMessage(msgspec.Struct):
    """One message of a conversation. Only the assistant's need no content, if they call tools."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None  # which call a message of role "tool" answers
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, as vLLM calls it
    function_call: CalledFunction | None = None  # what `tool_calls` have replaced

    @property
    def thoughts(self) -> str | None:
        """The assistant's reasoning, under either name."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content


class ChatRequest(ToolFields, kw_only=True):
    """The body of `/v1/chat/completions`."""

    messages: list[RequestMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None  # None is yes, unless the last message goes on
    continue_final_message: bool = False
    reasoning_effort: str | None = None  # what it does is up to the template, as with the next
    verbosity: str | None = None
    include_reasoning: bool = True
    separate_reasoning: bool = True  # SGLang's
    modalities: list[str] | None = None
    media_io_kwargs: MediaOptions | None = None
    functions: list[Function] | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None
    audio: Any = None
    echo: Any = None
    moderation: Any = None
    web_search_options: Any = None

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens reported per generated token; None without log
        probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def variables(self) -> dict[str, Any]:
        """Template variables beside the messages."""
        given = {
            "tools": msgspec.to_builtins(self.offered) or None,
            "documents": self.documents or None,
            "reasoning_effort": self.reasoning_effort,
            "verbosity": self.verbosity,
        }
        return template_variables(self.chat_template_kwargs, given)

    @property
    def answer_format(self) -> JsonSchemaFormat | None:
        """The schema that `response_format` has for the answer."""
        wanted = self.response_format
        is_schema = wanted is not None and wanted.type == "json_schema"
        return wanted.json_schema if wanted is not None and is_schema else None


class CompletionRequest(SamplingFields, kw_only=True):
    """The body of `/v1/completions`. A prompt is text or token ids; there may be several."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None

    @property
    def num_sequences(self) -> int:
        """Number of continuations per prompt."""
        return self.best_of or self.n or 1

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens reported per generated token; None without log
        probabilities."""
        return self.logprobs


VectorType = Literal["float", "base64", "binary", "ubinary"]


class TextInput(msgspec.Struct):
    """A text as Jina wraps it."""

    text: str


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """The body of `/v1/embeddings`. The input is text or token ids; there may be several.

    Those from `embedding_type` to `truncate_dim` are Jina's, as in `jina.py`.
    """

    input: str | list[str | TextInput] | list[int] | list[list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    embedding_type: VectorType | list[VectorType] | None = None
    task: str | None = None
    normalized: bool = False
    truncate: bool = False
    late_chunking: bool = False
    return_multivector: bool = False
    truncate_dim: int | None = None
    truncation_side: Literal["left", "right"] = "right"
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of vLLM's `/tokenize`: a text, or a conversation."""

    prompt: str | None = None
    messages: list[RequestMessage] = []
    model: str | None = None
    add_special_tokens: bool | None = None  # by default to a text; see ChatTemplate.to_encode
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: MediaOptions | None = None
    tools: list[Tool | CustomTool] | None = None

    @property
    def variables(self) -> dict[str, Any]:
        """Template variables beside the messages."""
        tools = [as_function(tool) for tool in self.tools or ()]
        given = {"tools": msgspec.to_builtins(tools) or None}
        return template_variables(self.chat_template_kwargs, given)

    @property
    def answer_format(self) -> None:
        """There is none: vLLM's `/tokenize` has no such field."""


def template_variables(kwargs: dict[str, Any] | None, given: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of a template: those of the client's that are not `given` otherwise."""
    return (kwargs or {}) | {name: value for name, value in given.items() if value is not None}


ABSENT = msgspec.Raw(b"null")


class WarmBody(msgspec.Struct):
    """What tells a body of `/v1/kv/warm` apart."""

    prompt: msgspec.Raw = ABSENT
    messages: msgspec.Raw = ABSENT


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of vLLM's `/detokenize`."""

    tokens: list[int]
    model: str | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """The same, whose ids are not decoded yet."""

    tokens: msgspec.Raw
    model: str | None = None


def whole(number: str) -> int | float:
    """Return a number of JSON, 1.0 and 1e3 as integers.

    Raises:
        OverflowError: no double is as large.
    """
    value = float(number)
    integer = int(value)
    return integer if integer == value and abs(integer) <= MAX_EXACT else value


WHOLE_NUMBERS = msgspec.json.Decoder(float_hook=whole)


class BodyDecoder:
    """A decoder for one kind of body. As with pydantic, 1.0 is the integer 1."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)

    def decode(self, body: bytes | memoryview) -> Any:
        """Decode a body.

        Raises:
            InvalidBody: it is not JSON, or a field has the wrong type; the text names it.
        """
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            if FLOAT_FOR_INT.match(str(error)) and len(body) <= MAX_FLOATS_BYTES:
                return self._decode_whole_numbers(body, error)
            raise wrong_type(error, self._kind) from None
        except BAD_JSON as error:
            raise InvalidBody(why_not_json(body, error)) from None

    def _decode_whole_numbers(
        self, body: bytes | memoryview, first: msgspec.ValidationError
    ) -> Any:
        """Decode a body again, `first` being what was wrong."""
        try:
            return msgspec.convert(WHOLE_NUMBERS.decode(body), self._kind)
        except msgspec.ValidationError as error:
            raise wrong_type(error, self._kind) from None
        except OverflowError:
            raise wrong_type(first, self._kind) from None
        except BAD_JSON as error:
            raise InvalidBody(why_not_json(body, error)) from None


def wrong_type(error: msgspec.ValidationError, kind: Any) -> InvalidBody:
    """Return that a body of some kind has a field of another type."""
    fault = fault_of(str(error), kind)
    if not fault.is_known:
        log.warning("no message is known for what msgspec says: %s", str(error)[:MAX_LOGGED])
    return InvalidBody(fault.described("the body"), fault.where or None)


def why_not_json(body: bytes | memoryview, error: Exception) -> str:
    """Return the error of a body that is not JSON."""
    if isinstance(error, RecursionError):
        return "the body is nested too deeply; use fewer levels"
    if LONE_SURROGATE.search(body):
        return "the body has half of a surrogate pair in a string; send whole characters"
    if isinstance(error, UnicodeDecodeError):
        return "the body is not valid UTF-8"
    fault = syntax_fault(str(error))
    if not fault:
        log.warning("no message is known for what msgspec says: %s", str(error)[:MAX_LOGGED])
    return f"the body is not valid JSON{f': {fault}' if fault else ''}"


class TextOrIds:
    """Decoders for a body with a field that is text, texts, token ids, or lists of token ids.

    msgspec takes no union of two list types, so the forms are tried in turn.
    """

    def __init__(self, kind: type[msgspec.Struct], name: str, text: Any = str) -> None:
        """Make decoders for a field `name`, whose texts are `text` in a list."""
        self._name = name
        self._forms = [
            BodyDecoder(msgspec.defstruct("Form", [(name, form)], bases=(kind,), kw_only=True))
            for form in (str | list[text], list[int], list[list[int]])
        ]

    def decode(self, body: bytes | memoryview) -> Any:
        """Decode a body; raises as `BodyDecoder.decode` does."""
        for form in self._forms:
            try:
                return form.decode(body)
            except InvalidBody as error:
                root = re.split(r"[.\[]", error.param or "")[0]
                if root != self._name or str(error).endswith(REQUIRED):
                    raise
        raise InvalidBody(
            f"{self._name}: must be a string, a list of strings, a list of token ids, or a list "
            "of lists of token ids",
            self._name,
        )


CHAT = BodyDecoder(ChatRequest)
COMPLETION = TextOrIds(CompletionRequest, "prompt")
EMBEDDING = TextOrIds(EmbeddingRequest, "input", str | TextInput)
WARM = BodyDecoder(WarmBody)
TOKENIZE = BodyDecoder(TokenizeRequest)
DETOKENIZE, DETOKENIZE_IDS = BodyDecoder(DetokenizeRequest), BodyDecoder(DetokenizeBody)


def decode_chat(body: bytes | memoryview) -> ChatRequest:
    """Decode and check the body of `/v1/chat/completions`."""
    request: ChatRequest = CHAT.decode(body)
    check_chat(request)
    return request


def checked_chat(body: dict[str, Any]) -> ChatRequest:
    """Make a chat of the body that another API's request comes to.

    Raises:
        RequestError: it asks for what there is not. The text names a chat's field.
    """
    try:
        chat = msgspec.convert(body, ChatRequest)
    except msgspec.ValidationError as error:
        raise wrong_type(error, ChatRequest) from None
    check_chat(chat)
    return chat


def check_chat(request: ChatRequest) -> None:
    """Refuse what cannot be honored of a conversation, in whatever form it came."""
    check_sampling(request)
    if not request.messages:
        raise InvalidValue("messages: must have at least one message", "messages")
    if request.top_logprobs and not request.logprobs:
        raise InvalidValue("top_logprobs: only allowed with 'logprobs': true", "top_logprobs")
    read_files(request.messages)
    take_functions(request)
    take_called(request.messages)
    if request.functions:
        with as_written(FUNCTION_NAMES):
            check_tools(request)
    else:
        check_tools(request)
    check_continued(request)
    check_media(request)


def check_media(request: ChatRequest) -> None:
    """Refuse fields for features that this server lacks, such as audio."""
    refuse(request, UNSUPPORTED)
    if not request.separate_reasoning:
        raise Unsupported(
            "separate_reasoning: thoughts are reported apart, unless --reasoning-parser is none",
            "separate_reasoning",
        )
    if request.modalities and request.modalities != ["text"]:
        raise Unsupported("modalities: must be ['text']", "modalities")


def read_files(messages: list[RequestMessage]) -> None:
    """Put the texts of files in their places."""
    for index, message in enumerate(messages):
        for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type == FILE_PART:
                where = f"messages[{index}].content[{place}].file"
                part.text = text_of_file(part.file or FileData(), where)
                part.type, part.file = "text", None


def check_continued(request: ChatRequest | TokenizeRequest) -> None:
    """Refuse to go on with the last message and to begin another one."""
    if request.continue_final_message and request.add_generation_prompt:
        raise InvalidValue(
            "continue_final_message: not together with 'add_generation_prompt': true",
            "continue_final_message",
        )


def decode_completion(body: bytes | memoryview) -> CompletionRequest:
    """Decode and check the body of `/v1/completions`."""
    request: CompletionRequest = COMPLETION.decode(body)
    check_completion(request)
    return request


def check_completion(request: CompletionRequest) -> None:
    """Refuse what cannot be honored of a continuation, in whatever form it came."""
    check_sampling(request)
    if request.logprobs is not None and not 0 <= request.logprobs <= MAX_LOGPROBS:
        raise InvalidValue(
            f"logprobs: must be between 0 and {MAX_LOGPROBS}, not {request.logprobs}", "logprobs"
        )
    for name in ("echo", "truncate_prompt_tokens") if request.suffix else ():
        if getattr(request, name):
            raise Unsupported(f"{name}: not together with 'suffix'", name)
    if request.best_of is not None:
        check_best_of(request, request.best_of)
    check_not_empty(request.prompt, "prompt")


def decode_warm(body: bytes | memoryview) -> ChatRequest | CompletionRequest:
    """Decode and check the body of `/v1/kv/warm`: one of chat or of completions."""
    shape: WarmBody = WARM.decode(body)
    has_prompt, has_messages = (bytes(f) != bytes(ABSENT) for f in (shape.prompt, shape.messages))
    if has_prompt == has_messages:
        raise InvalidValue("prompt: there must be either 'prompt' or 'messages'", "prompt")
    return decode_completion(body) if has_prompt else decode_chat(body)


def check_best_of(request: CompletionRequest, best_of: int) -> None:
    """Refuse fewer candidates than answers, and candidates of a stream."""
    if best_of < (request.n or 1):
        raise InvalidValue(f"best_of: must be at least n, {request.n}, not {best_of}", "best_of")
    if request.stream and best_of > (request.n or 1):
        raise InvalidValue("best_of: must be n with 'stream': true", "best_of")


def decode_embedding(body: bytes | memoryview) -> EmbeddingRequest:
    """Decode and check the body of `/v1/embeddings`."""
    request: EmbeddingRequest = EMBEDDING.decode(body)
    check_ranges(request)
    check_not_empty(request.input, "input")
    if request.truncate and request.truncate_prompt_tokens is None:
        request.truncate_prompt_tokens = -1
    return request


def decode_tokenize(body: bytes | memoryview) -> TokenizeRequest:
    """Decode and check the body of `/tokenize`."""
    request: TokenizeRequest = TOKENIZE.decode(body)
    if (request.prompt is None) == (not request.messages):
        raise InvalidValue("prompt: there must be either 'prompt' or 'messages'", "prompt")
    read_files(request.messages)
    take_called(request.messages)
    check_offered(request.tools or [])
    check_continued(request)
    return request


def decode_detokenize(body: bytes | memoryview) -> "tuple[array[int], str | None]":
    """Decode the body of `/detokenize`; return its ids and its model.

    Millions of ids are decoded a part at a time: Python's numbers take eight times the memory.
    """
    fields: DetokenizeBody = DETOKENIZE_IDS.decode(body)
    try:
        return numbers_of(bytes(fields.tokens)), fields.model
    except (msgspec.DecodeError, OverflowError):  # in one piece: the error has its place
        request: DetokenizeRequest = DETOKENIZE.decode(body)
        for id in request.tokens:
            if id.bit_length() > MAX_ID_BITS:
                raise InvalidValue(f"tokens: {id} is not a token id", "tokens") from None
        return array("q", request.tokens), request.model


def numbers_of(data: bytes) -> "array[int]":
    """Return the numbers of a JSON list.

    Raises:
        msgspec.DecodeError: it is not a list of numbers, or one with lists or texts among them.
        OverflowError: a number has more than 64 bits.
    """
    found = array("q")
    start, inner = 0, data.strip().removeprefix(b"[").removesuffix(b"]")
    if data.strip()[:1] != b"[" or not inner.strip():
        return array("q", msgspec.json.decode(data, type=list[int]))
    while start < len(inner):
        end = inner.find(b",", start + NUMBERS_BYTES)
        end = len(inner) if end < 0 else end
        found.extend(msgspec.json.decode(b"[" + inner[start:end] + b"]", type=list[int]))
        start = end + 1
    return found


def check_not_empty(prompt: str | list[Any], name: str) -> None:
    """Refuse a list of no prompts. An empty text is refused for having no tokens."""
    if isinstance(prompt, list) and not prompt:
        raise InvalidValue(f"{name}: must not be empty", name)


def prompt_list(prompt: str | list[Any]) -> list[str | list[int]]:
    """Return the prompts of a request as a list of prompts, each text or token ids.

    Texts may be wrapped.
    """
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]  # a list that starts with an id is all ids
    return [one.text if isinstance(one, TextInput) else one for one in prompt]
