"""llm: a model of its file `extra-openai-models.yaml`."""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scenario import (
    CALL_TOKENS,
    KEY,
    MODEL,
    URL,
    WEATHER_QUESTION,
    Call,
    Person,
    get_weather,
    main,
)

folder = tempfile.TemporaryDirectory()
os.environ["LLM_USER_PATH"] = folder.name
(Path(folder.name) / "extra-openai-models.yaml").write_text(
    json.dumps(
        [
            {
                "model_id": "served",
                "model_name": MODEL,
                "api_base": f"{URL}/v1",
                "supports_schema": True,
                "supports_tools": True,
            }
        ]
    )
)

import llm  # noqa: E402 (it reads the variable)
import openai  # noqa: E402

ERROR, REFUSED = openai.BadRequestError, "max_tokens"
NOT_OFFERED = {"required": "the model decides", "named": "the model decides"}


def ask(question: str, max_tokens: int, temperature: float = 0, **options: Any) -> Any:
    model: Any = llm.get_model("served")
    return model.prompt(
        question, key=KEY, max_tokens=max_tokens, temperature=temperature, **options
    )


def chat(question: str, max_tokens: int) -> str:
    return str(ask(question, max_tokens, stream=False).text())


def stream(question: str, max_tokens: int) -> Iterator[str]:
    pieces = iter(ask(question, max_tokens))
    try:
        yield from pieces
    finally:
        pieces.close()


def call(_choice: str) -> Call | None:
    calls = ask(WEATHER_QUESTION, CALL_TOKENS, tools=[get_weather], stream=False).tool_calls()
    return (calls[0].name, calls[0].arguments) if calls else None


def structured(question: str, max_tokens: int) -> Any:
    return json.loads(ask(question, max_tokens, schema=Person, stream=False).text())


def error() -> None:
    """The client checks all numbers itself but this one."""
    ask("Hello.", -1, stream=False).text()


main(globals())
