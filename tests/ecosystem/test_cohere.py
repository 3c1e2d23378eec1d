"""Cohere's official client: it is told a URL, and nothing else."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from embedding_models import TEXTS, minilm
from servers import RunningServer

pytestmark = pytest.mark.filterwarnings("default")  # it is not ours

cohere = pytest.importorskip("cohere", reason="make ecosystem")


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    running = RunningServer(str(minilm()), "--served-model-name", "minilm")
    with cohere.ClientV2(api_key="-", base_url=running.url) as found:
        yield found
    assert running.stop() == 0


def embedded(client: Any, kinds: list[str]) -> Any:
    return client.embed(
        model="minilm", texts=TEXTS, input_type="search_document", embedding_types=kinds
    ).embeddings


def test_cohere_embeds(client: Any) -> None:
    found = embedded(client, ["float", "int8"])
    vectors = np.array(found.float_)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)
    np.testing.assert_allclose(np.array(found.int8) / 127, vectors, atol=0.5 / 127 + 1e-6)


def test_cohere_ranks_by_cosines(client: Any) -> None:
    query, *documents = TEXTS
    results = client.rerank(model="minilm", query=query, documents=documents, top_n=3).results
    vectors = np.array(embedded(client, ["float"]).float_)
    cosines = vectors[1:] @ vectors[0]
    assert [one.index for one in results] == np.argsort(-cosines)[:3].tolist()
    for one in results:
        assert one.relevance_score == pytest.approx(cosines[one.index], abs=1e-4)


def test_cohere_reads_our_errors(client: Any) -> None:
    with pytest.raises(cohere.errors.BadRequestError, match="between 1 and 384"):
        client.embed(model="minilm", texts=["x"], input_type="search_query", output_dimension=385)
