"""A tool call and its result, with OpenAI's client.

The arguments always match the schema: the server draws no token that breaks it.
"""

import json

from openai import OpenAI

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


def get_weather(city: str, unit: str) -> str:
    """Stand in for a weather service."""
    return f"{7 if unit == 'celsius' else 45} degrees {unit} and rain in {city}"


client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id

messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
completion = client.chat.completions.create(
    model=model,
    messages=messages,
    tools=[WEATHER],
    tool_choice="required",
    parallel_tool_calls=False,
    temperature=0,
)
message = completion.choices[0].message
messages.append(message.model_dump(exclude_none=True))
for call in message.tool_calls:
    print(f"call: {call.function.name}({call.function.arguments})")
    result = get_weather(**json.loads(call.function.arguments))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

completion = client.chat.completions.create(
    model=model,
    messages=messages,
    tools=[WEATHER],
    tool_choice="none",
    temperature=0,
    max_tokens=100,
)
print(f"answer: {completion.choices[0].message.content}")
