"""Ids are those of `tokenizers`, from the core or from Python."""

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from embedding_models import minilm
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.model_card import find_demo_model
from headrace.errors import ModelError
from headrace.model.tokenizer_json import read_tokenizer_json
from headrace.tokenizer_proc.encoding import encoder as encoder_module
from headrace.tokenizer_proc.encoding.encoder import Encoder, Fast, HuggingFace, first_difference
from headrace.tokenizer_proc.jobs.stages import Ids, Text

TEXTS = ["Hello world", "<|im_start|>user\nnaïve 猫 😀<|im_end|>", "", "  x\n\n\t y " * 50]
MODELS = {"demo": find_demo_model(), "minilm": minilm()}


@pytest.fixture(scope="module")
def fast() -> Encoder:
    encoder = Encoder(str(MODELS["demo"]))
    encoder.load_fast()
    assert encoder._fast is not None
    return encoder


def reference(model: str) -> tokenizers.Tokenizer:
    path = MODELS[model]
    assert path is not None
    tokenizer = tokenizers.Tokenizer.from_buffer(read_tokenizer_json(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("loads_fast", [False, True])
def test_ids_are_right_before_and_after_the_fast_one_is_loaded(
    model: str, loads_fast: bool
) -> None:
    encoder = Encoder(str(MODELS[model]))
    if loads_fast:
        encoder.load_fast()
    right = reference(model)
    wanted = [Text(text, special) for text in TEXTS for special in (False, True)]
    for one, ids in zip(wanted, encoder.encode(wanted), strict=True):
        assert ids.tolist() == right.encode(one.text, add_special_tokens=one.add_special_tokens).ids
        assert encoder.decode(ids) == right.decode(ids.tolist())
        spelled = [right.id_to_token(id) for id in ids.tolist()]
        assert encoder.tokens(ids) == spelled
    assert encoder.empty.tolist() == right.encode("").ids


def test_pieces_of_a_text_are_encoded_apart() -> None:
    encoder, right = Encoder(str(MODELS["demo"])), reference("demo")
    pieces = ("<|im_end|>", "a<|", "im_end|>", "b", "c")
    apart = Text("".join(pieces), add_special_tokens=True, pieces=pieces)
    plain, cut = Text("Hi", add_special_tokens=False), encoder.encode([apart])[0].tolist()
    assert cut == [id for one in pieces for id in right.encode(one, add_special_tokens=False).ids]
    assert (
        cut.count(cut[0]) == 1 < encoder.encode([Text(apart.text, False)])[0].tolist().count(cut[0])
    )
    assert [ids.tolist() for ids in encoder.encode([plain, apart])] == [
        right.encode("Hi", add_special_tokens=False).ids,
        cut,
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=40), max_size=4))
def test_the_fast_one_agrees_on_any_text(fast: Encoder, texts: list[str]) -> None:
    exact = fast._load_exact().encode(texts, True)
    assert fast._encode(texts, True) == exact


def test_a_tokenizer_that_the_fast_one_does_not_know_stays_exact(
    caplog: pytest.LogCaptureFixture,
) -> None:
    encoder = Encoder(str(minilm()))
    with caplog.at_level(logging.INFO):
        encoder.load_fast()
    assert encoder._fast is None
    (line,) = caplog.messages
    assert line.startswith("encoding with tokenizers, not with fastokens: ")
    assert "BertNormalizer" in line


class OneTooMany(Fast):
    """Says a token twice where there is a digit."""

    def encode(self, texts: list[str], add_special_tokens: bool) -> list[Ids]:
        found = super().encode(texts, add_special_tokens)
        return [
            memoryview(bytes(ids) + bytes(ids[-1:])).cast("I") if "12" in text else ids
            for text, ids in zip(texts, found, strict=True)
        ]


def test_other_ids_are_found_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(encoder_module, "Fast", OneTooMany)
    encoder = Encoder(str(MODELS["demo"]))
    with caplog.at_level(logging.INFO):
        encoder.load_fast()
    assert encoder._fast is None
    assert "other ids for '0 1 12 123" in caplog.text


class Shouting(Fast):
    """Decodes in capitals."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return super().decode(ids, skip_special_tokens).upper()


def test_another_text_is_found_out() -> None:
    path = MODELS["demo"]
    assert path is not None
    data = read_tokenizer_json(path)
    assert first_difference(Fast(data), HuggingFace(data)) is None
    difference = first_difference(Shouting(data), HuggingFace(data))
    assert difference is not None
    assert difference.startswith('another text for the ids of "The quick')


def test_text_that_fastokens_gives_up_on_is_still_encoded(fast: Encoder) -> None:
    endless = " " * 1_000_000  # more than the regex engine of fastokens has room for
    assert fast._fast is not None
    with pytest.raises(ValueError, match="backtracking"):
        fast._fast.encode([endless], False)
    texts = [Text("Hi", False), Text(endless, False), Text("you", False)]
    found = [ids.tolist() for ids in fast.encode(texts)]
    assert found == [reference("demo").encode(t.text, add_special_tokens=False).ids for t in texts]


class PanicException(BaseException):  # as PyO3 calls it
    """What a panic of Rust is in Python: no Exception."""


class Panicking:
    """A library at its worst."""

    def encode_batch_flat(self, texts: list[str], _special: bool) -> tuple[bytes, bytes]:
        raise PanicException(f"index out of bounds for {texts}")


def test_missing_file_keeps_the_loaded_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.symlink_to(MODELS["demo"])
    encoder = Encoder(str(path))
    path.unlink()
    encoder.load_fast()
    assert encoder._fast is not None
    (ids,) = encoder.encode([Text("Hi", False)])
    assert ids.tolist() == reference("demo").encode("Hi", add_special_tokens=False).ids


def test_a_panic_in_a_library_is_one_texts_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder(str(MODELS["demo"]))
    encoder.load_fast()
    monkeypatch.setattr(encoder._fast, "_tokenizer", Panicking())
    (ids,) = encoder.encode([Text("Hi", False)])
    assert ids.tolist() == reference("demo").encode("Hi", add_special_tokens=False).ids


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=f"{tmp_path}: its tokenizer cannot be loaded"):
        Encoder(str(tmp_path))
