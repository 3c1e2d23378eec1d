"""A GGUF file's tokenizer gives the ids that other readers of the same file give."""

import functools
import itertools
import random
import unicodedata
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from demo_in_transformers import demo_tokenizer

from headrace.config.model_card import find_demo_model
from headrace.errors import ModelError
from headrace.model.gguf import read_metadata
from headrace.model.gguf_metadata import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    vocabulary_of,
)
from headrace.model.pre_tokenizers import PRE_TOKENIZERS
from headrace.model.tokenizer_json import (
    read_tokenizer_json,
    read_tokenizer_spec,
    tokenizer_json,
)

CORPUS = [
    "",
    " ",
    "Hello, world!",
    "It's what they'll say; I'VE said we'd.",
    "def f(x: int = 0) -> None:\n    if x >= 10:\n\t\treturn [x**2, ~x]  # ok\r\n",
    "<html><body class='a'>&nbsp;</body></html>",
    "3.14159 1234567890 007 1,000,000 ½ ² Ⅷ ٣٤",
    "2024-01-31T23:59:59Z 0xDEADBEEF 1e-9",
    "🦊 👩‍🚀 🇩🇪 👍🏽 ❤️ \U0001f9ff",
    "世界你好。日本語のテキスト、漢字かな交じり。한국어 문장",
    "Grüße aus Köln; čeština, ελληνικά, русский, עברית, العربية, हिन्दी, ไทย",
    "e\u0301 vs \u00e9, \u0130stanbul, ﬁ, ﷺ",
    "a  b   c    d\t\te\n\n\nf \n g  ",
    "   leading and trailing   ",
    "\n\n\n",
    "\u00a0\u2003\u3000\ufeff\u200b",
    "\x00\x01\x7f",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><repo_name>x<|im_start|",
    "no<|im_end|>space <|im_end|> space",
    "supercalifragilisticexpialidocious" * 5,
    "!!!???...,,,;;;---___===",
    "https://example.org/path?query=1&other=%20#frag",
]


def random_texts() -> list[str]:
    """Return texts of characters from all over Unicode, in runs."""
    draw = random.Random(0)
    ranges = [(32, 126), (160, 591), (0x400, 0x4FF), (0x4E00, 0x4EFF), (0x1F600, 0x1F64F), (9, 13)]
    texts = []
    for _ in range(200):
        text = ""
        for _ in range(draw.randint(1, 8)):
            low, high = draw.choice(ranges)
            text += "".join(chr(draw.randint(low, high)) for _ in range(draw.randint(1, 6)))
            text += " " * draw.randint(0, 2)
        texts.append(text)
    return texts


@functools.cache
def demo() -> tokenizers.Tokenizer:
    path = find_demo_model()
    assert path is not None
    return tokenizers.Tokenizer.from_buffer(read_tokenizer_json(path))


def expected_ids(text: str) -> list[int]:
    """Return the ids by `transformers`.

    In a GGUF file "smollm" means that digits stand alone, and the text around them too, which
    `tokenizers` does not know. So it encodes each digit and each text between digits.
    """
    pieces: list[str] = []
    for is_digit, group in itertools.groupby(text, lambda c: unicodedata.category(c)[0] == "N"):
        run = "".join(group)
        pieces += list(run) if is_digit else [run]
    if not pieces:
        return []
    ids: list[list[int]] = demo_tokenizer()(pieces, add_special_tokens=False)["input_ids"]
    return [id for piece in ids for id in piece]


@pytest.mark.parametrize("text", CORPUS)
def test_ids_are_those_of_transformers(text: str) -> None:
    assert demo().encode(text, add_special_tokens=False).ids == expected_ids(text)


def test_ids_of_random_texts_are_those_of_transformers() -> None:
    for text in random_texts():
        ids = demo().encode(text, add_special_tokens=False).ids
        assert ids == expected_ids(text), text


@pytest.mark.parametrize("text", CORPUS)
def test_text_comes_back(text: str) -> None:
    ids = demo().encode(text, add_special_tokens=False).ids
    assert demo().decode(ids, skip_special_tokens=False) == text


def test_digits_stand_alone() -> None:
    assert len(demo().encode("12345", add_special_tokens=False).ids) == 5


def test_control_tokens_are_single_ids_and_special() -> None:
    ids = demo().encode("<|im_start|>", add_special_tokens=False).ids
    assert ids == [1]
    assert demo().decode(ids) == ""


def test_every_token_of_the_file_has_its_id() -> None:
    path = find_demo_model()
    assert path is not None
    tokens = vocabulary_of(read_metadata(path).metadata)
    assert tokens is not None
    assert [demo().id_to_token(id) for id in range(len(tokens))] == list(tokens)


# Small vocabularies, made here


def byte_level(pre: str = "gpt-2", **fields: Any) -> dict[str, Any]:
    tokens = ["<s>", "a", "b", "Ġ", "ab", "Ġa", "</s>", "1", "11", "111"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["a b", "Ġ a", "1 1", "11 1"],
        "tokenizer.ggml.token_type": [CONTROL, *[NORMAL] * 5, CONTROL, *[NORMAL] * 3],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 6,
        **{f"tokenizer.ggml.{name}": value for name, value in fields.items()},
    }


SENTENCEPIECES = {
    "<unk>": (0.0, UNKNOWN),
    "<s>": (0.0, CONTROL),
    "</s>": (0.0, CONTROL),
    **{f"<0x{byte:02X}>": (0.0, BYTE) for byte in range(256)},
    "▁": (-9.0, NORMAL),
    "j": (-9.0, NORMAL),
    "e": (-9.0, NORMAL),
    "l": (-9.0, NORMAL),
    "o": (-9.0, NORMAL),
    "el": (-3.0, NORMAL),
    "llo": (-4.0, NORMAL),
    "je": (-2.0, NORMAL),
    "ll": (-1.0, NORMAL),
    "▁je": (-5.0, NORMAL),
    "▁jello": (-6.0, NORMAL),
    "<tool>": (0.0, USER_DEFINED),
}


def sentencepiece(**fields: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(SENTENCEPIECES),
        "tokenizer.ggml.scores": [score for score, _ in SENTENCEPIECES.values()],
        "tokenizer.ggml.token_type": [kind for _, kind in SENTENCEPIECES.values()],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{name}": value for name, value in fields.items()},
    }


def tokens_of(metadata: dict[str, Any], text: str, special: bool = False) -> list[str]:
    tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json(metadata, "x.gguf"))
    return tokenizer.encode(text, add_special_tokens=special).tokens


def round_trip(metadata: dict[str, Any], text: str) -> str:
    tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json(metadata, "x.gguf"))
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids)


def test_merges_are_applied_in_order() -> None:
    assert tokens_of(byte_level(), "ab ab") == ["ab", "Ġ", "ab"], "a b goes before Ġ a"
    assert tokens_of(byte_level(), "a a") == ["a", "Ġa"]


def test_a_merge_of_a_version_is_no_comment() -> None:
    metadata = byte_level(
        "qwen2", tokens=["#version", *"#version", "a", "#versiona"], token_type=[]
    )
    merges = ["# v", "#v e", "#ve r", "#ver s", "#vers i", "#versi o", "#versio n"]
    parts = [merge.replace(" ", "") for merge in merges[:-1]]
    metadata["tokenizer.ggml.tokens"] += parts
    metadata["tokenizer.ggml.merges"] = [*merges, "#version a"]
    assert tokens_of(metadata, "#versiona") == ["#versiona"]


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("gpt-2", ["11", "111"]),
        ("smollm", ["1"] * 5),
        ("llama-bpe", ["111", "11"]),
        ("qwen2", ["1"] * 5),
    ],
)
def test_the_pre_tokenizer_decides_how_digits_group(pre: str, tokens: list[str]) -> None:
    assert tokens_of(byte_level(pre), "11111") == tokens


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_loads_and_keeps_the_text(pre: str) -> None:
    assert round_trip(byte_level(pre), "ab a") == "ab a"


def test_scores_decide_what_is_merged() -> None:
    # ll (-1) goes before el (-3), whatever their order in the file.
    assert tokens_of(sentencepiece(), "jello") == ["▁jello"]
    assert tokens_of(sentencepiece(), "ello") == ["▁", "e", "llo"]
    assert tokens_of(sentencepiece(), "jel") == ["▁je", "l"]


def test_what_has_no_piece_becomes_bytes() -> None:
    assert tokens_of(sentencepiece(), "é") == ["▁", "<0xC3>", "<0xA9>"]


@pytest.mark.parametrize("text", ["jello", "jello  jello", " jello", "é🦊\n", ""])
def test_sentencepiece_text_comes_back(text: str) -> None:
    assert round_trip(sentencepiece(), text) == text


def test_no_space_is_put_before_the_text_where_the_file_says_so() -> None:
    assert tokens_of(sentencepiece(add_space_prefix=False), "je") == ["je"]
    assert round_trip(sentencepiece(add_space_prefix=False), " je") == " je"


def test_user_defined_tokens_are_matched_and_kept_in_text() -> None:
    spec = msgspec.json.decode(tokenizer_json(sentencepiece(), "x.gguf"))
    special = {token["content"]: token["special"] for token in spec["added_tokens"]}
    assert special == {"<unk>": True, "<s>": True, "</s>": True, "<tool>": False}
    assert "<tool>" in tokens_of(sentencepiece(), "je<tool>je")


def test_sentencepiece_adds_bos_and_byte_level_does_not() -> None:
    assert tokens_of(sentencepiece(), "je", special=True) == ["<s>", "▁je"]
    assert tokens_of(byte_level(), "ab", special=True) == ["ab"]


def test_the_pre_tokenizer_decides_about_bos_too() -> None:
    assert tokens_of(byte_level("llama-bpe"), "ab", special=True) == ["<s>", "ab"]
    assert tokens_of(byte_level("llama-bpe", add_bos_token=False), "ab", special=True) == ["ab"]


@pytest.mark.parametrize("id", [-1, 10, None])
def test_a_bos_that_is_no_token_is_not_added(id: int | None) -> None:
    metadata = byte_level(add_bos_token=True, bos_token_id=id)
    assert tokens_of(metadata, "ab", special=True) == ["ab"]


def test_tokens_of_phi3_take_the_spaces_after_them() -> None:
    phi3 = sentencepiece() | {"general.name": "Phi-3-mini-4k"}
    assert tokens_of(phi3, "<tool> \nje") == ["<tool> \n", "▁je"]
    assert tokens_of(phi3, "<s> je")[:3] == ["<s>", "▁", "▁je"]


def test_bos_and_eos_are_added_as_the_file_says() -> None:
    both = byte_level(add_bos_token=True, add_eos_token=True)
    assert tokens_of(both, "ab", special=True) == ["<s>", "ab", "</s>"]
    assert tokens_of(sentencepiece(add_bos_token=False), "je", special=True) == ["▁je"]


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({}, "model is None; gpt2, gemma4 and llama"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.model": "t5"}, "'t5'; .*tokenizer.json, works"),
        (byte_level("deepseek-v9"), "'deepseek-v9', none of the .*tokenizer.json, works"),
        (byte_level(merges=None), "merges is missing"),
        (byte_level(merges=[1, 2]), "cannot be used: Expected `str`, got `int`"),
        (byte_level(add_bos_token="yes"), r"cannot be used: .* at `\$\.add_bos_token`"),
        (byte_level(token_type=[CONTROL]), "token_type has 1 entries for 10 tokens"),
        (sentencepiece(scores=None), "scores is missing"),
        (sentencepiece(scores=[]), "scores has 0 entries for 271 tokens"),
        (sentencepiece(scores=[0.0]), "scores has 1 entries for 271 tokens"),
    ],
)
def test_what_is_not_known_is_refused_by_name(metadata: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=rf"x\.gguf.*{complaint}"):
        tokenizer_json(metadata, "x.gguf")


def test_a_folder_gives_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    assert read_tokenizer_json(tmp_path) == b"{}"


def test_the_content_of_a_tokenizer_json_is_that_of_the_file(tmp_path: Path) -> None:
    path = find_demo_model()
    assert path is not None
    data = read_tokenizer_json(path)
    (tmp_path / "tokenizer.json").write_bytes(data)
    assert read_tokenizer_spec(path) == read_tokenizer_spec(tmp_path) == msgspec.json.decode(data)


@pytest.mark.parametrize("content", ["[]", "{", ""])
def test_a_tokenizer_json_that_is_no_object_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a JSON object"):
        read_tokenizer_spec(tmp_path)
