"""instructor: each of its modes asks for structured output in another way.

`JSON_SCHEMA` sends a response format, `TOOLS` a named tool, `RESPONSES_TOOLS` a named tool beside a
format, and `PARALLEL_TOOLS` leaves the choice to the model.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import instructor
import openai
from instructor import Mode
from instructor.core import IncompleteOutputException, InstructorRetryException
from pydantic import BaseModel, ConfigDict
from scenario import CALL_TOKENS, KEY, MODEL, URL, WEATHER_QUESTION, Call, Person, main

ERROR = InstructorRetryException
NOT_OFFERED = {"required": "tools are named", "abort": "streams are read to their ends"}
openai_client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)


class Answer(BaseModel):
    """An answer."""

    text: str


class get_weather(BaseModel):
    """The weather of a city, today."""

    model_config = ConfigDict(extra="forbid")
    city: str
    unit: Literal["C", "F"]


def client(mode: Mode) -> Any:
    return instructor.from_openai(openai_client, mode=mode).chat.completions


def asked(question: str, max_tokens: int, model: Any) -> Any:
    messages = [{"role": "user", "content": question}]
    fields = {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    return fields | {"response_model": model, "max_retries": 0}


def chat(question: str, max_tokens: int) -> str:
    answer = client(Mode.JSON_SCHEMA).create(**asked(question, 4 * max_tokens, Answer))
    return str(answer.text)


def stream(question: str, max_tokens: int) -> Iterator[str]:
    before = ""
    asking = asked(question, 4 * max_tokens, Answer)
    for answer in client(Mode.JSON_SCHEMA).create_partial(**asking):
        text = answer.text or ""
        yield text.removeprefix(before)
        before = text


def call(choice: str) -> Call | None:
    if choice == "auto":
        asking = asked(WEATHER_QUESTION, CALL_TOKENS, Iterable[get_weather])
        try:
            weather = next(client(Mode.PARALLEL_TOOLS).create(**asking))
        except (InstructorRetryException, IncompleteOutputException) as no_call:
            assert "No tool calls" in str(no_call) or "max_tokens" in str(no_call)
            return None
    else:
        asking = asked(WEATHER_QUESTION, CALL_TOKENS, get_weather)
        weather = client(Mode.TOOLS).create(**asking)
        both = client(Mode.RESPONSES_TOOLS).create(**asking)
        assert isinstance(both, get_weather), both
    return "get_weather", weather.model_dump()


def structured(question: str, max_tokens: int) -> Person:
    person: Person = client(Mode.JSON_SCHEMA).create(**asked(question, max_tokens, Person))
    return person


def error() -> None:
    client(Mode.JSON_SCHEMA).create(**asked("Hello.", 8, Answer) | {"temperature": -1})


main(globals())
