"""Texts are filled in by the tokens that a model has for it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tokenizers
from byte_encoder import ByteEncoder
from planners import EOS, HTTP, make_planner

from headrace.config.model_card import infill_token_ids
from headrace.errors import RequestError
from headrace.ipc.messages import GenerateRequest
from headrace.tokenizer_proc.encoding.encoder import Encoder
from headrace.tokenizer_proc.encoding.infilling import SPELLINGS, infilling_of
from headrace.tokenizer_proc.jobs.stages import Sequences

QWEN = {"<|fim_prefix|>": 200, "<|fim_suffix|>": 201, "<|fim_middle|>": 202, "<|file_sep|>": 203}


class CoderEncoder(ByteEncoder):
    """Has Qwen's tokens."""

    infill_tokens: ClassVar[dict[str, int]] = QWEN


def filled(encoder: ByteEncoder | None = None, **fields: Any) -> Sequences:
    planner = make_planner(encoder=encoder or CoderEncoder())
    body = {"prompt": "ab", "suffix": "yz", **fields}
    return planner.plan("completion", HTTP, json.dumps(body).encode())


def test_a_suffix_comes_after_the_place_to_fill_in() -> None:
    marked = [1, 200, *b"ab", 201, *b"yz", 202]
    assert filled().prompts[0].tolist() == marked
    assert filled(prompt=[1, *b"ab"]).prompts[0].tolist() == marked
    assert filled(add_special_tokens=False).prompts[0].tolist() == marked[1:]
    both = filled(prompt=["ab", "c"], n=2).prompts
    assert [prompt[2] for prompt in both] == [*b"aacc"]
    assert make_planner().plan("completion", HTTP, b'{"prompt": "ab", "suffix": ""}')


def test_what_is_filled_in_ends_at_any_mark_of_a_file() -> None:
    request: GenerateRequest = filled(stop_token_ids=[9, EOS]).requests[0]
    assert request.stop_token_ids == [EOS, 200, 201, 202, 203, 9]
    assert filled(ignore_eos=True, stop_token_ids=[9]).requests[0].stop_token_ids == [9]
    assert filled(suffix=None).requests[0].stop_token_ids == [EOS]


@pytest.mark.parametrize("row", SPELLINGS)
def test_every_spelling_of_the_marks_is_known(row: tuple[str, str, str]) -> None:
    spelled = {text: 10 + place for place, text in enumerate(row) if text}
    found = infilling_of({}, spelled)
    assert found is not None
    begin, before, after = (memoryview(bytes([id, 0, 0, 0])).cast("I") for id in (1, 2, 3))
    expected = [1, 10, 2, 11, 3, 12] if row[2] else [1, 11, 3, 10, 2]
    assert found.prompt(begin, before, after).tolist() == expected


def test_the_names_of_a_gguf_file_come_before_spellings() -> None:
    names = {"pre": 1, "suf": 2, "mid": 3, "rep": 4, "sep": 99}
    metadata = {f"tokenizer.ggml.fim_{role}_token_id": id for role, id in names.items()}
    named = infill_token_ids(metadata, 50)
    assert named == {"pre": 1, "suf": 2, "mid": 3, "rep": 4}
    found = infilling_of(named, QWEN)
    assert found is not None
    assert (*found[:3], found.ends) == (1, 2, 3, [1, 2, 3, 4, 203])
    assert infilling_of({"pre": 1}, {"<|fim_prefix|>": 1, "<SUF>": 2}) is None


def test_the_older_names_of_a_gguf_file_are_known() -> None:
    names = {"prefix": 1, "suffix": 2, "middle": 3}
    metadata = {f"tokenizer.ggml.{role}_token_id": id for role, id in names.items()}
    assert infill_token_ids(metadata, 50) == {"pre": 1, "suf": 2, "mid": 3}
    newer = metadata | {"tokenizer.ggml.fim_mid_token_id": 4}
    assert infill_token_ids(newer, 50) == {"pre": 1, "suf": 2, "mid": 4}


def byte_level(bos: str) -> tokenizers.Tokenizer:
    """Return a tokenizer of bytes, as GPT-2's kin have it."""
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocab = {letter: id for id, letter in enumerate(sorted(letters))}
    found = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return with_bos(found, bos)


def sentencepiece(bos: str) -> tokenizers.Tokenizer:
    """Return a tokenizer of characters that puts a space before a text, as Llama's kin do."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abyz", "▁y", "yz"]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    merges = [("▁", "y"), ("y", "z")]
    model = tokenizers.models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True)
    found = tokenizers.Tokenizer(model)
    replace = tokenizers.normalizers.Replace(" ", "▁")
    found.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), replace]
    )
    return with_bos(found, bos)


def with_bos(tokenizer: tokenizers.Tokenizer, bos: str) -> tokenizers.Tokenizer:
    if bos:
        tokenizer.add_special_tokens([bos])
        ids = [(bos, tokenizer.token_to_id(bos))]
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=ids
        )
    return tokenizer


# By family: its kind of tokenizer, BOS, and the prompt of what is between "ab" and "yz".
FAMILIES: dict[str, tuple[Callable[[str], tokenizers.Tokenizer], str, list[str]]] = {
    "Qwen2.5-Coder": (
        byte_level,
        "",
        ["<|fim_prefix|>", "a", "b", "<|fim_suffix|>", "y", "z", "<|fim_middle|>"],
    ),
    "StarCoder2": (
        byte_level,
        "",
        ["<fim_prefix>", "a", "b", "<fim_suffix>", "y", "z", "<fim_middle>"],
    ),
    "DeepSeek-Coder": (
        byte_level,
        "<｜begin▁of▁sentence｜>",
        ["<｜fim▁begin｜>", "a", "b", "<｜fim▁hole｜>", "y", "z", "<｜fim▁end｜>"],
    ),
    "CodeGemma": (
        byte_level,
        "<bos>",
        ["<|fim_prefix|>", "a", "b", "<|fim_suffix|>", "y", "z", "<|fim_middle|>"],
    ),
    "CodeLlama": (sentencepiece, "<s>", ["▁<PRE>", "▁", "a", "b", "▁<SUF>", "yz", "▁<MID>"]),
    "Codestral": (sentencepiece, "<s>", ["[SUFFIX]", "yz", "[PREFIX]", "▁", "a", "b"]),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_filled_in_as_it_was_trained(family: str, tmp_path: Path) -> None:
    kind, bos, expected = FAMILIES[family]
    tokenizer = kind(bos)
    tokenizer.add_special_tokens([token for token in expected if len(token) > 2])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder: Any = Encoder(str(tmp_path))
    for is_fast in (False, True):
        if is_fast:
            encoder.load_fast()
        (prompt,) = filled(encoder).prompts
        assert encoder.tokens(prompt) == [bos] * bool(bos) + expected


@pytest.mark.parametrize(
    ("encoder", "fields", "says"),
    [
        (ByteEncoder(), {}, "suffix: this model's vocabulary has no tokens to fill in the middle"),
        (CoderEncoder(), {"echo": True}, "echo: not together with 'suffix'"),
        (CoderEncoder(), {"truncate_prompt_tokens": 3}, "truncate_prompt_tokens: not together"),
        (CoderEncoder(), {"suffix": "z" * 200}, "maximum context length is 100"),
    ],
)
def test_a_suffix_that_cannot_be_honored_is_refused(
    encoder: ByteEncoder, fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(RequestError, match=says):
        filled(encoder, **fields)
