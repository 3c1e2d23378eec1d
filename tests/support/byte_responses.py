"""Responses of which each token is a byte."""

from typing import Any

from headrace.detokenizer_proc.frames import Frames
from headrace.detokenizer_proc.inflight_responses import InflightResponses
from headrace.detokenizer_proc.text import ByteStream, TextStream, special_tokens
from headrace.ipc.messages import (
    Abort,
    Api,
    ResponsePlan,
    ResponsesForm,
    StepOutput,
    StopSequence,
)
from headrace.model.sampling_defaults import OPENAI
from headrace.model.token_table import TokenTable
from headrace.tokenizer_proc.requests.responses import decode_responses, echo_of

END = 0
RESPONSES_FORM = ResponsesForm(echo_of(decode_responses(b'{"input": "Hi"}'), OPENAI))

# Ids are bytes; 0 is a special end token.
TABLE = TokenTable([b"<end>", *(bytes([byte]) for byte in range(1, 256))], frozenset([END]))


class ByteVocabulary:
    """A vocabulary of which the core has no table."""

    def stream(
        self,
        skip_special_tokens: bool,
        spaces_between: bool = True,
        kept: frozenset[str] = frozenset(),
    ) -> TextStream:
        return ByteStream(TABLE, skip_special_tokens, special_tokens(TABLE, kept))

    def special_tokens(self, contents: frozenset[str]) -> dict[int, str]:
        return special_tokens(TABLE, contents)

    def token_bytes(self, id: int) -> bytes:
        return TABLE.token_bytes[id]


def take(
    responses: InflightResponses, output: StepOutput, tokens: bytes
) -> tuple[dict[int, Frames], list[StopSequence | Abort]]:
    responses.feed(output, tokens)
    found = {frontend: responses.render(frontend) for frontend in range(2)}
    return {k: frames for k, frames in found.items() if frames is not None}, responses.stops()


NOTHING = StepOutput.of({}, [], [], [])


def make_plan(**fields: Any) -> ResponsePlan:
    defaults: dict[str, Any] = {
        "response_id": "x-1",
        "model": "tiny",
        "created": 5,
        "api": Api.COMPLETION,
        "stream": False,
        "include_usage": False,
        "num_sequences": 1,
        "num_prompt_tokens": 3,
        "index": 0,
        "stop": [],
        "include_stop": False,
        "skip_special_tokens": True,
    }
    return ResponsePlan(**(defaults | fields))
