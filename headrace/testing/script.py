"""The vocabulary of scripts: what a mock engine answers, and to which requests.

A test writes it in Python. `PUT /mock/script` takes the same as JSON, where `type` names an answer.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec

MAX_DELAY_S = 600
MAX_TOKENS = 1 << 20
MalformedKind = Literal["cut", "json", "no_end", "content_type"]

Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_DELAY_S)]
Status = Annotated[int, msgspec.Meta(ge=400, le=599)]


class MockToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tool_call"):
    """A call of a tool that the request offers, in the model's own format."""

    name: str
    arguments: dict[str, Any] = {}


class MockReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="reply"):
    """A text, after a thought and before calls, where there are some."""

    text: str = ""
    thought: str = ""
    calls: list[MockToolCall] = []


class Words(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="words"):
    """English words of exactly `num_tokens` tokens, the end token among them.

    They are a function of the prompt and `seed`, or else the request's own seed.
    """

    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    seed: int | None = None


class MockError(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="error"):
    """An error in the form of the request's API.

    Fields that are not given are as the status has them. With `after`, a stream says that text and
    ends with the error as an event; a request that does not stream gets the status.
    """

    status: Status = 500
    message: str = ""
    retry_after: Seconds | None = None  # the header of that name, in seconds
    error_type: str = ""
    code: str = ""
    after: str | None = None


class Malformed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="malformed"):
    """A response that breaks its protocol after `text`.

    Args:
        kind: `cut` closes the connection in the middle of an event, or of the body. `json` ends
            with an event, or a body, that is not JSON. `no_end` lacks the events that close a
            stream, such as `[DONE]`. `content_type` claims to be HTML.
    """

    kind: MalformedKind
    text: str = "One, two, three"

    def __post_init__(self) -> None:
        kinds = get_args(MalformedKind)
        if self.kind not in kinds:
            names = ", ".join(kinds)
            raise ValueError(f"Malformed({self.kind!r}) is not known; it must be one of {names}")


class Delay(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="delay"):
    """Another answer, later, or with time between its tokens."""

    seconds: Seconds
    answer: "Undelayed"
    token_interval: Seconds = 0.0  # the server's other texts slow down, too, while it runs


Undelayed = MockReply | MockToolCall | Words | MockError | Malformed
ScriptedAnswer = Undelayed | Delay


class ScriptRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answers in order, for the requests that match all that is given here.

    Args:
        model: the name that the request has for the model.
        contains: a part of the last message, or of the prompt.
        pattern: a regular expression, which is searched for in the same.
        api_key: the key that the client sends.
        repeat: begin anew after the last answer; else the rule matches no further request.
    """

    answers: list[ScriptedAnswer]
    model: str | None = None
    contains: str | None = None
    pattern: str | None = None
    api_key: str | None = None
    repeat: bool = False

    def __post_init__(self) -> None:
        if not self.answers:
            raise ValueError("a rule has no answers; give at least one")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ValueError(
                f"pattern {self.pattern!r} is no regular expression: {error}"
            ) from None


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rules. The first one decides that matches a request and has an answer left."""

    rules: list[ScriptRule]


class ScriptState(msgspec.Struct, frozen=True):
    """What is left of a script: unused answers per rule."""

    num_left: list[int]


def script_of(items: Sequence[ScriptedAnswer | ScriptRule], repeat: bool = False) -> Script:
    """Return a script of rules; answers among them are a last rule, which matches any request.

    Args:
        repeat: of the last rule.
    """
    rules = [item for item in items if isinstance(item, ScriptRule)]
    answers = [item for item in items if not isinstance(item, ScriptRule)]
    return Script([*rules, ScriptRule(answers, repeat=repeat)] if answers else rules)
