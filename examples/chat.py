"""A conversation of two turns, with OpenAI's client."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id

messages = []
for question in ("What is the capital of France?", "And of Italy?"):
    messages.append({"role": "user", "content": question})
    completion = client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=40
    )
    answer = completion.choices[0].message.content
    messages.append({"role": "assistant", "content": answer})
    print(f"{question}\n{answer}\n")
