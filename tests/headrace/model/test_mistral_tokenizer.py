"""Texts become the tokens of mistral-common, from its own files and from small ones."""

import random
import shutil
from pathlib import Path

import pytest
import tokenizers
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_files import DATA, MERGED, NUM_SPECIAL, SPECIAL, VOCAB_SIZE, write_tekken

from headrace.errors import ModelError
from headrace.model.mistral_tokenizer import find_mistral_tokenizer, read_mistral_vocabulary
from headrace.model.token_table import read_table
from headrace.model.tokenizer_json import read_tokenizer_json, read_tokenizer_spec

PIECES = "mistral_instruct_tokenizer_240323.model.v3"
TEXTS = [
    "",
    " ",
    "anana banana ab aba  ababa",
    "[INST] <s>it</s> [TOOL_CALLS]",
    "стий\r\n水 é 🎈 12",
]


def own(path: Path) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_buffer(read_tokenizer_json(path))
    tokenizer.encode_special_tokens = True
    return tokenizer


def check_ids(path: Path, texts: list[str]) -> None:
    """Compare with mistral-common: ids of texts, and texts of ids."""
    theirs, ours = MistralTokenizer.from_file(path).instruct_tokenizer.tokenizer, own(path)
    for text in texts:
        ids = theirs.encode(text, bos=True, eos=False)
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids) == theirs.decode(ids)


def some_texts(number: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    pieces = [*MERGED, *SPECIAL[:5], " ", "a", "n", "b", "é", "\n", "1"]
    return ["".join(rng.choices(pieces, k=rng.randrange(1, 30))) for _ in range(number)]


def test_a_tekken_gives_the_ids_of_mistral_common(tmp_path: Path) -> None:
    check_ids(write_tekken(tmp_path), TEXTS + some_texts(500, 0))


@pytest.mark.slow
def test_nemo_s_vocabulary_gives_the_ids_of_mistral_common(tmp_path: Path) -> None:
    path = tmp_path / "tekken.json"
    shutil.copy(DATA / "tekken_240718.json", path)
    check_ids(path, TEXTS + some_texts(500, 1))


def test_pieces_give_the_ids_of_mistral_common() -> None:
    check_ids(DATA / PIECES, TEXTS + some_texts(500, 2))


def test_tokens_have_the_bytes_of_mistral_common(tmp_path: Path) -> None:
    path = write_tekken(tmp_path)
    theirs, table = MistralTokenizer.from_file(path), read_table(read_tokenizer_spec(path))
    assert table is not None
    assert table.special == frozenset(range(NUM_SPECIAL))
    for id in range(NUM_SPECIAL, VOCAB_SIZE):
        piece = theirs.instruct_tokenizer.tokenizer.id_to_byte_piece(id)
        assert table.token_bytes[id] == piece
    assert [table.token_bytes[id].decode() for id in range(len(SPECIAL))] == [*SPECIAL]


def test_a_folder_s_newest_file_is_found(tmp_path: Path) -> None:
    assert find_mistral_tokenizer(tmp_path) is None
    for name in ("tokenizer.model", "tokenizer.model.v1", "tokenizer.model.v3", "x.model.vx"):
        (tmp_path / name).write_bytes(b"")
    assert find_mistral_tokenizer(tmp_path) == tmp_path / "tokenizer.model.v3"
    path = write_tekken(tmp_path)
    assert find_mistral_tokenizer(tmp_path) == path


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not a tokenizer of its name"),
        (b"{}", "missing required field `config`"),
    ],
)
def test_a_tekken_that_is_none_is_refused(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "tekken.json"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=says):
        read_mistral_vocabulary(path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"default_vocab_size": VOCAB_SIZE + 1}, "default_vocab_size is 300 for 30 special"),
        ({"default_num_special_tokens": 3}, "for 26 special tokens"),
    ],
)
def test_counts_of_a_tekken_agree(tmp_path: Path, changes: dict[str, int], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        read_mistral_vocabulary(write_tekken(tmp_path, **changes))


@pytest.mark.parametrize("size", [0, 1, 100, 10_000])
def test_pieces_that_are_cut_off_are_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "tokenizer.model.v3"
    path.write_bytes((DATA / PIECES).read_bytes()[:size])
    with pytest.raises(ModelError, match=r"tokenizer\.model\.v3: "):
        read_mistral_vocabulary(path)
