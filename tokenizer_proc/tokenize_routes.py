"""`/tokenize` and `/detokenize`, as vLLM has them."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from headrace import routes
from headrace.config.process_configs import ModelCard
from headrace.errors import InvalidValue, ModelNotFound
from headrace.ipc.adapter_registry import AdapterRegistry
from headrace.ipc.messages import HttpRequest
from headrace.response_bodies.tokens import DetokenizeResponse, TokenizeResponse
from headrace.tokenizer_proc.encoding.chat_template import ChatTemplate
from headrace.tokenizer_proc.images.images import Images, none_of
from headrace.tokenizer_proc.jobs.stages import (
    Body,
    Encoding,
    Handler,
    Ids,
    ImmediateResponse,
    Stages,
    Text,
    json_response,
)
from headrace.tokenizer_proc.requests.openai import (
    TokenizeRequest,
    decode_detokenize,
    decode_tokenize,
)
from headrace.tokenizer_proc.requests.sampling import check_token_ids

CHUNK = 1 << 16  # token ids made into Python's numbers at once
MAX_TEXT_BYTES = 128 << 20  # of an answer
NO_CHARACTER = "\ufffd"


class Spelling(Protocol):
    """Tokenizer methods needed beside encoding.

    Attributes:
        decodes_bytes: a text is that of its tokens' bytes, one after the other.
    """

    decodes_bytes: bool

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`."""
        ...

    def tokens(self, ids: Sequence[int]) -> list[str | None]:
        """Return each token as the vocabulary spells it."""
        ...


class TokenRoutes:
    """Texts as tokens and back. Nothing is computed of them: only answers have a limit."""

    def __init__(
        self,
        card: ModelCard,
        template: ChatTemplate,
        spelling: Spelling,
        images: Images | None = None,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        self._card = card
        self._adapters = adapters
        self._template = template
        self._spelling = spelling
        self._images_of = images.of if images else partial(none_of, card.takes_images)

    @property
    def handlers(self) -> dict[str, Handler]:
        """The handler of each route of token ids."""
        return {routes.TOKENIZE: self.tokenize, routes.DETOKENIZE: self.detokenize}

    def tokenize(self, http: HttpRequest, body: Body) -> Stages:
        """Answer `/tokenize`."""
        request = decode_tokenize(body)
        self._check_model(request.model)
        text = yield from self._text(http.id, request)
        (ids,) = yield [text]
        tokens: Any = msgspec.Raw(json_numbers(ids))
        return json_response(
            TokenizeResponse(
                count=len(ids),
                max_model_len=self._card.max_model_len,
                tokens=tokens,
                token_strs=self._spelling.tokens(ids) if request.return_token_strs else None,
            )
        )

    def _text(self, id: int, request: TokenizeRequest) -> Encoding[Text]:
        if request.prompt is not None:
            return Text(request.prompt, request.add_special_tokens is not False)
        images = self._images_of(id, request.messages, b"", request.media_io_kwargs)
        return (yield from images.written(self._template.prompt(request)))

    def detokenize(self, _http: HttpRequest, body: Body) -> ImmediateResponse:
        """Answer `/detokenize`."""
        ids, model = decode_detokenize(body)
        self._check_model(model)
        check_token_ids("tokens", ids, self._card.vocab_size)
        prompt: Any = msgspec.Raw(json_text(self._texts(ids)))
        return json_response(DetokenizeResponse(prompt=prompt))

    def _texts(self, ids: "array[int]") -> Iterator[str]:
        """Yield the text of `ids`, in parts where a token's text does not depend on others'."""
        size = CHUNK if self._spelling.decodes_bytes else max(1, len(ids))
        start = 0
        while start < len(ids):
            end = start + size
            text = self._decoded(ids[start:end])
            while end < len(ids) and text.endswith(NO_CHARACTER):  # maybe the rest of one follows
                end += size
                text = self._decoded(ids[start:end])
            yield text
            start = end

    def _decoded(self, ids: "array[int]") -> str:
        return self._spelling.decode(ids, skip_special_tokens=False)

    def _check_model(self, name: str | None) -> None:
        if name is None or name == self._card.name:
            return
        if self._adapters is None or self._adapters.find(name) is None:
            raise ModelNotFound(name, self._card.name)


def json_numbers(ids: Ids) -> bytes:
    """Return token ids as a JSON list. A list of Python's numbers would take ten times as much."""
    chunks = (ids[i : i + CHUNK] for i in range(0, len(ids), CHUNK))
    return b"[" + b",".join(msgspec.json.encode(c.tolist())[1:-1] for c in chunks) + b"]"


def json_text(parts: Iterable[str]) -> bytearray:
    """Return the parts of a text as one JSON string.

    Raises:
        InvalidValue: it is longer than `MAX_TEXT_BYTES`.
    """
    data = bytearray(b'"')
    for part in parts:
        data += msgspec.json.encode(part)[1:-1]
        if len(data) > MAX_TEXT_BYTES:
            raise InvalidValue(
                f"tokens: their text has more than {MAX_TEXT_BYTES} bytes of JSON; send fewer",
                "tokens",
            )
    return data + b'"'
