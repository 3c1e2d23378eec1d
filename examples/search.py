"""The documents nearest to a question, with Headrace's own client.

The server needs an embedding model or a cross-encoder: `launch_server MODEL`, for example
BAAI/bge-small-en-v1.5.
"""

from headrace import Client

DOCUMENTS = [
    "Water boils at 100 degrees Celsius at sea level.",
    "The Eiffel Tower is in Paris.",
    "Photosynthesis turns light into chemical energy.",
    "The Colosseum was built in Rome.",
]

with Client("http://127.0.0.1:8000") as client:
    ranking = client.rerank("Where is the Eiffel Tower?", DOCUMENTS, top_n=2)
    for result in ranking.results:
        print(f"{result.relevance_score:.2f} {DOCUMENTS[result.index]}")
