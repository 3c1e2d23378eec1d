"""Cosine similarities of sentences, with OpenAI's client.

The server needs an embedding model: `launch_server MODEL`, for example BAAI/bge-small-en-v1.5.
"""

import numpy as np
from openai import OpenAI

SENTENCES = [
    "The cat sits on the mat.",
    "A kitten rests on a rug.",
    "The price of oil rose again.",
]

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
answer = client.embeddings.create(model=client.models.list().data[0].id, input=SENTENCES)
vectors = np.array([item.embedding for item in answer.data])
vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)

for sentence, cosines in zip(SENTENCES, vectors @ vectors.T, strict=True):
    print("  ".join(f"{cosine:5.2f}" for cosine in cosines), sentence)
