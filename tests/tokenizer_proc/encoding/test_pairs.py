"""Two texts as one are what Hugging Face's tokenizers make of a pair."""

from typing import Any

import pytest
import tokenizers
from embedding_models import minilm
from hypothesis import given
from hypothesis import strategies as st

from headrace.tokenizer_proc.encoding.encoder import Encoder
from headrace.tokenizer_proc.encoding.pairs import PairMarks, pair
from headrace.tokenizer_proc.jobs.stages import Text, ids_of

words = st.text("ab c,é", max_size=30)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(str(minilm()))


@pytest.fixture(scope="module")
def reference() -> Any:
    found = tokenizers.Tokenizer.from_file(str(minilm() / "tokenizer.json"))
    found.no_padding()
    return found


@given(first=words, second=words, limit=st.none() | st.integers(4, 40))
def test_a_pair_is_the_reference_s(
    encoder: Encoder, reference: Any, first: str, second: str, limit: int | None
) -> None:
    reference.no_truncation()
    if limit is not None:
        reference.enable_truncation(limit, strategy="longest_first")
    expected = reference.encode(first, second)
    ids = encoder.encode([Text(first, False), Text(second, False)])
    found = pair(encoder.pair_marks(), ids[0], ids[1], limit)
    assert found.ids.tolist() == expected.ids
    assert found.second_text == expected.type_ids.index(1)


def test_a_model_without_types_gets_none() -> None:
    marks = PairMarks(ids_of([0]), ids_of([2, 2]), ids_of([2]), None)
    found = pair(marks, ids_of([5]), ids_of([6, 7]), None)
    assert (found.ids.tolist(), found.second_text) == ([0, 5, 2, 2, 6, 7, 2], 0)
