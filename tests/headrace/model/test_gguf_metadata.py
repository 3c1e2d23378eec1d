"""What a GGUF file says of its model, beside vocabulary and layers."""

from typing import Any

import pytest

from headrace.model.gguf_metadata import end_token_ids, trained_length

TOKENS = ["<unk>", "<eos>", "<|im_end|>", "<end_of_turn>", "a"]
NORMAL, CONTROL = 1, 3


@pytest.mark.parametrize(
    ("named", "kinds", "ends"),
    [
        ({"eos": 1}, [CONTROL, CONTROL, NORMAL, NORMAL, NORMAL], (1,)),
        ({"eos": 4, "eot": 1, "eom": 0}, [NORMAL] * 5, (4, 1, 0)),
        ({"eos": 2, "eot": 2}, [NORMAL] * 5, (2,)),
        ({"eos": 1}, [CONTROL] * 5, (1, 2, 3)),
        ({"eos": 1, "unknown": 2}, [CONTROL] * 5, (1, 3)),
        ({"eos": "<eos>"}, [CONTROL] * 3, (2,)),
        ({"eos": -1, "eot": 5}, [NORMAL] * 5, ()),
        ({}, None, ()),
    ],
)
def test_ends_are_named_or_have_the_text_of_one(
    named: dict[str, Any], kinds: list[int] | None, ends: tuple[int, ...]
) -> None:
    metadata = {f"tokenizer.ggml.{kind}_token_id": id for kind, id in named.items()}
    metadata |= {"tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.token_type": kinds}
    assert end_token_ids(metadata) == ends


def test_the_end_of_a_message_is_none_of_an_answer() -> None:
    tokens = ["<|end|>", "<|return|>", "<|call|>"]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [CONTROL] * 3}
    assert end_token_ids(metadata) == (1, 2)


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["<s>", "<|end_of_text|>", "<|eot_id|>"], (1, 2)),
        (["<s>", "<eos>", "x", "<end_of_turn>"], (1, 3)),
        (["<s>", "<|endoftext|>", "<|end|>", "<|return|>", "<|call|>"], (1, 3, 4)),
        (["<s>", "</s>", "<|end|>"], (1, 2)),
        (["<s>", "</s>", "x"], (1,)),
    ],
)
def test_ends_of_a_turn_end_an_answer(tokens: list[str], ends: tuple[int, ...]) -> None:
    kinds = [NORMAL if token == "x" else CONTROL for token in tokens]
    vocabulary = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    assert end_token_ids({"tokenizer.ggml.eos_token_id": 1, **vocabulary}) == ends


def test_ends_outside_the_vocabulary_are_left_out() -> None:
    named = {"tokenizer.ggml.eos_token_id": -1, "tokenizer.ggml.eot_token_id": 5}
    assert end_token_ids({"tokenizer.ggml.tokens": TOKENS, **named}) == ()


@pytest.mark.parametrize(
    ("keys", "tensors", "length"),
    [
        ({"rope.scaling.original_context_length": 64}, (), None),  # YaRN has one rule for all
        ({"rope.scaling.original_context_length": 64}, ("rope_factors_long.weight",), 64),
        ({}, ("rope_factors_long.weight",), None),
    ],
)
def test_the_trained_length_bounds_what_changes_beyond_it(
    keys: dict[str, Any], tensors: tuple[str, ...], length: int | None
) -> None:
    metadata = {f"phi3.{key}": value for key, value in keys.items()}
    assert trained_length({"general.architecture": "phi3", **metadata}, tensors) == length


@pytest.mark.parametrize("id", [-1, 2, 1 << 50])
def test_an_end_that_is_no_token_is_none(id: int) -> None:
    metadata = {"tokenizer.ggml.eos_token_id": id, "tokenizer.ggml.tokens": ["a", "b"]}
    assert end_token_ids(metadata) == ()


@pytest.mark.parametrize("length", [-4096, 0])
def test_a_trained_length_of_no_tokens_is_none(length: int) -> None:
    key = "phi3.rope.scaling.original_context_length"
    metadata = {"general.architecture": "phi3", key: length}
    assert trained_length(metadata, {"rope_factors_long.weight"}) is None
