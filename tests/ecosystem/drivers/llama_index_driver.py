"""llama-index: its model of servers that are like OpenAI's."""

from collections.abc import Iterator
from typing import Any

import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
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

ERROR = openai.BadRequestError
OPEN_SCHEMA = True  # the schema that the client writes has no additionalProperties


def model(max_tokens: int, **fields: Any) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=f"{URL}/v1",
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        max_tokens=max_tokens,
        max_retries=0,
        additional_kwargs={"temperature": 0, **fields},
    )


def chat(question: str, max_tokens: int) -> str:
    return model(max_tokens).chat([ChatMessage(question)]).message.content or ""


def stream(question: str, max_tokens: int) -> Iterator[str]:
    for piece in model(max_tokens).stream_chat([ChatMessage(question)]):
        yield piece.delta or ""


def call(choice: str) -> Call | None:
    llm = model(CALL_TOKENS)
    wanted = "get_weather" if choice == "named" else choice
    tool = FunctionTool.from_defaults(get_weather)
    answer = llm.chat_with_tools([tool], user_msg=WEATHER_QUESTION, tool_choice=wanted)
    calls = llm.get_tool_calls_from_response(answer, error_on_no_tool_call=False)
    return (calls[0].tool_name, calls[0].tool_kwargs) if calls else None


def structured(question: str, max_tokens: int) -> Any:
    prompt = PromptTemplate("{question}")
    return model(max_tokens).structured_predict(Person, prompt, question=question)


def error() -> None:
    model(8, temperature=-1).chat([ChatMessage("Hello.")])


main(globals())
