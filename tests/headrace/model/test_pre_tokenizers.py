"""Each name of a pre-tokenizer gives llama.cpp's ids, or those of the model's own pattern."""

import functools
import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
import regex
import tokenizers

from headrace.model.pre_tokenizers import PRE_TOKENIZERS
from headrace.model.tokenizer_json import UTF8_BPE, tokenizer_json
from headrace.tokenizer_proc.encoding.encoder import Fast

RECORD = Path(__file__).parent / "recorded/llama_cpp_ids.json"  # tests/support/llama_cpp_ids.py

# What a text has where llama.cpp, with simpler classes, departs from the model's own pattern.
FOREIGN_CASE_OR_MARKS = r"\p{M}|(?=[\p{Lu}\p{Ll}\p{Lt}])[^A-Za-z]"
GROUPED_DIGITS = r"\s\d|\d\w"  # glued to what is before them
DEPARTURES = {
    **dict.fromkeys(
        ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "tekken", "kimi-k2"),
        FOREIGN_CASE_OR_MARKS,
    ),
    "granite-embed-multi-97m": FOREIGN_CASE_OR_MARKS,
    "youtu": FOREIGN_CASE_OR_MARKS,
    "tiny_aya": f"{FOREIGN_CASE_OR_MARKS}|{GROUPED_DIGITS}",
    "cohere2moe": f"{FOREIGN_CASE_OR_MARKS}|{GROUPED_DIGITS}",
    "afmoe": GROUPED_DIGITS,
}


@functools.cache
def record() -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(RECORD.read_bytes())
    return found


def data_of(case: str) -> bytes:
    """Return the `tokenizer.json` of a recorded case."""
    one = record()["cases"][case]
    fields = record()["kinds"][one["kind"]] | one["fields"]
    return tokenizer_json({f"tokenizer.ggml.{key}": fields[key] for key in fields}, "x.gguf")


def pieces(patterns: tuple[str, ...], text: str) -> list[str]:
    """Return a text cut by each pattern in turn, as the `regex` package matches."""
    found = [text]
    for pattern in patterns:
        cuts = regex.compile(pattern, regex.V1)
        parts, found = found, []
        for part in parts:
            places = {0, len(part), *itertools.chain(*(m.span() for m in cuts.finditer(part)))}
            found += [part[start:end] for start, end in itertools.pairwise(sorted(places))]
    return found


def test_every_name_is_recorded() -> None:
    assert set(PRE_TOKENIZERS) | set(UTF8_BPE) <= set(record()["cases"])


@pytest.mark.parametrize("case", record()["cases"])
def test_ids_are_those_of_llama_cpp(case: str) -> None:
    tokenizer = tokenizers.Tokenizer.from_buffer(data_of(case))
    places = record()["cases"][case]["ids"]
    for text, ids, place in zip(record()["texts"], record()["ids"], places, strict=True):
        found = tokenizer.encode(text).ids
        if found != ids[place]:
            assert case in DEPARTURES, text
            assert regex.search(DEPARTURES[case], text), text


@pytest.mark.parametrize("pre", DEPARTURES)
def test_pieces_are_those_of_the_models_own_pattern(pre: str) -> None:
    steps = tokenizers.Tokenizer.from_buffer(data_of(pre)).pre_tokenizer
    for text in record()["texts"]:
        cuts = [span for _, span in steps.pre_tokenize_str(text)]
        assert [text[start:end] for start, end in cuts] == pieces(
            PRE_TOKENIZERS[pre].patterns, text
        )


@pytest.mark.parametrize("case", record()["cases"])
def test_fastokens_gives_the_same_ids(case: str) -> None:
    data = data_of(case)
    exact = tokenizers.Tokenizer.from_buffer(data)
    found = Fast(data).encode(record()["texts"], True)
    assert [list(ids) for ids in found] == [exact.encode(text).ids for text in record()["texts"]]
