"""dspy: its model; predictors and adapters make prompts for it."""

import json
from collections.abc import Iterator
from typing import Any

import dspy
from dspy.utils.exceptions import LMInvalidRequestError
from scenario import (
    CALL_TOKENS,
    KEY,
    MODEL,
    NAMED,
    TOOL,
    URL,
    WEATHER_QUESTION,
    Call,
    Person,
    main,
)

ERROR = LMInvalidRequestError
NOT_OFFERED = {"abort": "a thread reads streams to their ends"}


def model(max_tokens: int, temperature: float = 0.0) -> dspy.LM:
    return dspy.LM(
        f"openai/{MODEL}",
        api_base=f"{URL}/v1",
        api_key=KEY,
        max_tokens=max_tokens,
        temperature=temperature,
        cache=False,
        num_retries=0,
    )


def chat(question: str, max_tokens: int) -> str:
    return str(model(max_tokens)(question)[0])


def stream(question: str, max_tokens: int) -> Iterator[str]:
    class Program(dspy.Module):
        def forward(self, question: str) -> dspy.Prediction:
            return dspy.Prediction(answer=model(max_tokens)(question)[0])

    pieces = dspy.streamify(Program(), async_streaming=False)(question=question)
    for piece in pieces:
        if not isinstance(piece, dspy.Prediction):
            yield piece.choices[0].delta.content or ""


def call(choice: str) -> Call | None:
    wanted = NAMED if choice == "named" else choice
    (answer,) = model(CALL_TOKENS)(WEATHER_QUESTION, tools=[TOOL], tool_choice=wanted)
    calls = answer.get("tool_calls") if isinstance(answer, dict) else None
    if not calls:
        return None
    function = calls[0]["function"]
    return function["name"], json.loads(function["arguments"])


def structured(question: str, max_tokens: int) -> Any:
    """The format is given by hand: the adapters give one only to models that dspy knows."""
    (answer,) = model(max_tokens)(question, response_format=Person)
    return json.loads(answer["text"] if isinstance(answer, dict) else answer)


def error() -> None:
    model(8, temperature=-1.0)("Hello.")


main(globals())
