"""Text parsed into a typed object, with OpenAI's client and a pydantic model.

The bounds of the fields become a grammar: they keep a small model from going on for ever.
"""

from openai import OpenAI
from pydantic import BaseModel, Field


class City(BaseModel):
    name: str = Field(max_length=40)
    country: str = Field(max_length=40)
    population: int = Field(ge=0, le=100_000_000)


client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
completion = client.chat.completions.parse(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Describe Paris as JSON."}],
    response_format=City,
    temperature=0,
    max_tokens=200,
)
city = completion.choices[0].message.parsed
print(f"{city.name} is in {city.country} and has {city.population:,} inhabitants.")
