"""A stream's text is the text that decoding all tokens at once would give."""

import functools
import subprocess
import sys
from typing import Any

import msgspec
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.model_card import find_demo_model
from headrace.detokenizer_proc.text import (
    TableVocabulary,
    Vocabulary,
    load_vocabulary,
)
from headrace.detokenizer_proc.tokenizers_text import LibraryVocabulary
from headrace.errors import ModelError
from headrace.model.token_table import TokenTable, byte_characters, read_table
from headrace.model.tokenizer_json import read_tokenizer_json

TEXT = "Grüße, 世界! 🦊👩‍🚀 naïve \u0e01\u0e33  x\n\n\tdef f(): return 1"


@functools.cache
def demo() -> tuple[tokenizers.Tokenizer, Vocabulary]:
    """The demo model's tokenizer, as the library has it and as ours."""
    path = find_demo_model()
    assert path is not None
    return tokenizers.Tokenizer.from_buffer(read_tokenizer_json(path)), load_vocabulary(str(path))


@functools.cache
def sentencepiece_spec(strips: bool = True) -> dict[str, Any]:
    """A vocabulary like Llama 2's: ▁ for a space, bytes for what has no token."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁je", "llo", "▁world", "x", "é", "!", "世"]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": id, "content": pieces[id], "special": True, "normalized": False}
            | {"single_word": False, "lstrip": False, "rstrip": False}
            for id in range(3)
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *([strip] if strips else []),
            ],
        },
        "model": {
            "type": "BPE",
            "vocab": {piece: id for id, piece in enumerate(pieces)},
            "merges": [],
            "unk_token": "<unk>",
            "byte_fallback": True,
            "fuse_unk": True,
        },
    }


@functools.cache
def sentencepiece() -> tuple[tokenizers.Tokenizer, Vocabulary]:
    """The same as the library has it, and its streams."""
    data = msgspec.json.encode(sentencepiece_spec())
    tokenizer = tokenizers.Tokenizer.from_buffer(data)
    return tokenizer, LibraryVocabulary(tokenizer)


def sentencepiece_table(strips: bool = True) -> Vocabulary:
    """The same, as a table."""
    table = read_table(sentencepiece_spec(strips))
    assert table is not None
    return TableVocabulary(table)


def stream_all(vocabulary: Vocabulary, ids: list[int], skip: bool) -> list[str]:
    """Return the text given out for each token, then what came at the end."""
    stream = vocabulary.stream(skip)
    return [*(stream.feed(id) for id in ids), stream.flush()]


def ids_of(tokenizer: tokenizers.Tokenizer, names: tuple[str, ...]) -> list[int]:
    found = [tokenizer.token_to_id(name) for name in names]
    ids = [id for id in found if id is not None]
    assert len(ids) == len(names), names
    return ids


def demo_pieces(*names: str) -> list[int]:
    return ids_of(demo()[0], names)


def token_bytes_of(text: str) -> list[int]:
    """Return `text` as the demo model's single-byte tokens: every character is split."""
    names = byte_characters()
    return demo_pieces(*(names[byte] for byte in text.encode()))


demo_ids = st.lists(
    st.one_of(
        st.integers(0, 49151).map(lambda id: [id]),
        st.integers(0, 20).map(lambda id: [id]),  # the special ones
        st.text(max_size=4).map(lambda text: demo()[0].encode(text).ids),
        st.sampled_from("é世🦊👩‍🚀ก").map(token_bytes_of),
        st.sampled_from("é世🦊").map(lambda text: token_bytes_of(text)[:-1]),
    ),
    max_size=12,
).map(lambda runs: [id for run in runs for id in run])


@settings(deadline=None, max_examples=200)
@given(ids=demo_ids, skip=st.booleans())
def test_a_byte_level_stream_equals_decoding_at_once(ids: list[int], skip: bool) -> None:
    tokenizer, vocabulary = demo()
    assert isinstance(vocabulary, TableVocabulary)
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(stream_all(vocabulary, ids, skip)) == expected


def test_text_comes_back_from_its_own_tokens() -> None:
    tokenizer, vocabulary = demo()
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert "".join(stream_all(vocabulary, ids, True)) == TEXT


@settings(deadline=None)
@given(ids=demo_ids)
def test_a_piece_is_whole_characters(ids: list[int]) -> None:
    _, vocabulary = demo()
    for piece in stream_all(vocabulary, ids, False):
        piece.encode()  # no lone surrogates, no half of one


def test_bytes_of_a_character_wait_for_the_last_one() -> None:
    _, vocabulary = demo()
    ids = token_bytes_of("🦊")
    assert len(ids) == 4
    assert stream_all(vocabulary, ids, True) == ["", "", "", "🦊", ""]


def test_an_incomplete_character_is_replaced_at_the_end() -> None:
    _, vocabulary = demo()
    assert stream_all(vocabulary, token_bytes_of("🦊")[:3], True) == ["", "", "", "\ufffd"]


def test_special_tokens_are_skipped_only_where_wanted() -> None:
    _, vocabulary = demo()
    ids = demo_pieces("<|im_end|>")
    assert stream_all(vocabulary, ids, True) == ["", ""]
    assert stream_all(vocabulary, ids, False) == ["<|im_end|>", ""]


def test_an_id_beyond_the_vocabulary_has_no_text() -> None:
    _, vocabulary = demo()
    assert stream_all(vocabulary, [10**6], True) == ["", ""]


def test_streams_of_a_vocabulary_do_not_touch_each_other() -> None:
    _, vocabulary = demo()
    fox, crab = token_bytes_of("🦊"), token_bytes_of("🦀")
    one, other = vocabulary.stream(True), vocabulary.stream(True)
    texts = [(one.feed(a), other.feed(b)) for a, b in zip(fox, crab, strict=True)]
    assert texts[-1] == ("🦊", "🦀")


def test_every_byte_has_a_character_of_its_own() -> None:
    characters = byte_characters()
    assert len(set(characters)) == 256
    assert all(character.isprintable() and character != " " for character in characters)
    assert (characters[ord("A")], characters[ord(" ")], characters[ord("\n")]) == ("A", "Ġ", "Ċ")


def pieces(*names: str) -> list[int]:
    return ids_of(sentencepiece()[0], names)


def fallback(text: str) -> list[int]:
    return pieces(*(f"<0x{byte:02X}>" for byte in text.encode()))


WORDS = ["<s>", "</s>", "▁", "▁je", "llo", "▁world", "x", "é", "!", "世"]
whole_ids = st.lists(
    st.one_of(
        st.sampled_from(WORDS).map(pieces),
        st.sampled_from("\n é世🦊").map(fallback),
    ),
    max_size=12,
).map(lambda runs: [id for run in runs for id in run])


@settings(deadline=None, max_examples=200)
@given(ids=whole_ids, skip=st.booleans())
def test_a_library_stream_equals_decoding_at_once(ids: list[int], skip: bool) -> None:
    tokenizer, vocabulary = sentencepiece()
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(stream_all(vocabulary, ids, skip)) == expected
    assert "".join(stream_all(sentencepiece_table(), ids, skip)) == expected


@settings(deadline=None, max_examples=100)
@given(ids=whole_ids, skip=st.booleans())
def test_a_first_space_stays_where_the_decoder_strips_none(ids: list[int], skip: bool) -> None:
    data = msgspec.json.encode(sentencepiece_spec(strips=False))
    expected = tokenizers.Tokenizer.from_buffer(data).decode(ids, skip_special_tokens=skip)
    assert "".join(stream_all(sentencepiece_table(strips=False), ids, skip)) == expected


def test_a_decoder_that_looks_at_neighbors_has_no_table() -> None:
    for decoder in ({"type": "WordPiece"}, {"type": "Metaspace"}, None):
        assert read_table(sentencepiece_spec() | {"decoder": decoder}) is None


def test_token_table_spells_tokens_as_the_library_does() -> None:
    _, library = sentencepiece()
    table = sentencepiece_table()
    assert [table.token_bytes(id) for id in range(300)] == [
        library.token_bytes(id) for id in range(300)
    ]


def test_only_the_first_space_is_stripped() -> None:
    _, vocabulary = sentencepiece()
    ids = pieces("▁je", "llo", "▁world", "▁je")
    assert stream_all(vocabulary, ids, True) == ["je", "llo", " world", " je", ""]


def test_fallback_bytes_wait_for_the_last_one() -> None:
    _, vocabulary = sentencepiece()
    ids = [*pieces("▁je"), *fallback("🦊"), *pieces("x")]
    assert stream_all(vocabulary, ids, True) == ["je", "", "", "", "🦊", "x", ""]


def test_incomplete_fallback_bytes_are_replaced_at_the_end() -> None:
    _, vocabulary = sentencepiece()
    ids = [*pieces("▁je"), *fallback("🦊")[:2]]
    assert "".join(stream_all(vocabulary, ids, True)) == "je\ufffd\ufffd"


@settings(deadline=None, max_examples=200)
@given(ids=st.lists(st.integers(0, 300), max_size=12), skip=st.booleans())
def test_no_run_of_tokens_ends_a_library_stream(ids: list[int], skip: bool) -> None:
    _, vocabulary = sentencepiece()
    words = pieces("x", "▁world")
    given = "".join(stream_all(vocabulary, [*ids, *words], skip))
    assert given.endswith("x world")


def test_bytes_that_undo_a_character_do_not_end_the_stream() -> None:
    # The library decodes a run of bytes as a whole: 0xFF makes the newline before it invalid too.
    _, vocabulary = sentencepiece()
    ids = pieces("x", "<0x0A>", "<0xFF>", "x", "▁world")
    assert "".join(stream_all(vocabulary, ids, True)) == "x\n\ufffdx world"


def test_a_model_without_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="nowhere"):
        load_vocabulary("/nowhere/model.gguf")


def test_spaces_between_special_tokens_can_be_left_out() -> None:
    spec = sentencepiece_spec() | {
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False}
    }
    library = LibraryVocabulary(tokenizers.Tokenizer.from_buffer(msgspec.json.encode(spec)))
    ids = pieces("x", "<s>", "</s>", "<s>", "x", "</s>")

    def text(skip: bool, spaces: bool) -> str:
        stream = library.stream(skip, spaces)
        return "".join(stream.feed(id) for id in ids) + stream.flush()

    assert text(skip=False, spaces=True) == "x <s> </s> <s> x </s>"
    assert text(skip=False, spaces=False) == "x <s></s><s> x </s>"
    assert text(skip=True, spaces=False) == "x x"


@pytest.mark.parametrize("kept", [frozenset[str](), frozenset({"<s>"})])
def test_some_special_tokens_are_kept_whatever_the_vocabulary(kept: frozenset[str]) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, "a"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    ids = [0, 2, 1, 3]
    library = LibraryVocabulary(tokenizer).stream(True, kept=kept)
    table = TokenTable([b"a", b"b", b"<s>", b"</s>"], frozenset({2, 3}))
    stream = TableVocabulary(table).stream(True, kept=kept)
    told = [stream.feed(id) for id in ids]
    assert told == ["a", "<s>" if kept else "", "b", ""]
    assert [library.feed(id).strip() for id in ids] == told


def test_a_table_of_bytes_loads_no_library() -> None:
    code = (
        "import headrace.detokenizer_proc.main, sys;"
        "from headrace.detokenizer_proc.text import load_vocabulary;"
        "load_vocabulary(sys.argv[1]); print(*sys.modules)"
    )
    command = [sys.executable, "-c", code, str(find_demo_model())]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not {"tokenizers", "numpy"} & set(result.stdout.split())
