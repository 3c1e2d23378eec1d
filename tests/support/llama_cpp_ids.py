"""Records llama.cpp's token ids under each name of a pre-tokenizer, for the tests of ours.

    python tests/support/llama_cpp_ids.py

It needs `llama-cpp-python`, which the tests do not. The vocabularies are small ones, trained here
on the texts without any cut, so that a cut in another place shows in the ids.
"""

# ruff: noqa: RUF001

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from headrace.model.gguf_metadata import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from headrace.model.pre_tokenizers import PRE_TOKENIZERS
from headrace.model.tokenizer_json import UTF8_BPE
from headrace.tokenizer_proc.encoding.probe_texts import CORPUS

RECORD = Path(__file__).parents[1] / "headrace/model/recorded/llama_cpp_ids.json"
NUM_MERGES = 700
NUM_RANDOM = 40
RANGES = [(32, 126), (32, 64), (160, 591), (0x300, 0x36F), (0x400, 0x4FF), (0x600, 0x6FF)]
RANGES += [(0xE00, 0xE3A), (0x3040, 0x30FF), (0x4E00, 0x4EFF), (0xAC00, 0xADFF), (0x1F600, 0x1F64F)]
TEXTS = [
    *CORPUS,
    "I'M xyz'RE x'S x'Ve xyz'LL i'd it'T 's'S ''s 'sx 'lls don't'll O'Neil l'été d'une",
    "HELLOworld helloWORLD HelloWorld iPhone XMLHttpRequest getURLFor ÀÉÎõü Ǆungla ΑΒΓδ ДЕжз",
    "1 22 333 4444 55555 666666 7777777 88888888 999999999 1234567890123 12a345b6789 0.5 1,234.56",
    " 1  22   333 x1 y22 z333 №42 ①②③ ⅣⅤ 一二三 ٠١٢٣٤ ०१२३४५",
    "a\n\nb\r\n\r\nc\t\td \n e\n \nf \t\n\t g\r\rh\x0b\x0ci\u2028j\u2029k\u0085l",
    "\n",
    "\n\n",
    " \n",
    "\n ",
    "\t",
    "  ",
    "   \n   ",
    "x ",
    "x  ",
    "x\n",
    "x\n\n",
    " x",
    "\r\n",
    "foo();\n\n\nbar() {\n\t\treturn /* path */ a/b//c;\n}\n//\n/ \n?/\n!!/\n\n",
    "नमस्ते क्षि বাংলা তামিল தமிழ் ไทยที่ น้ำ កម្ពុជា မြန်မာ e\u0301a\u0300 x\u0323\u0307 1\u0301 \u0301",
    "汉字ひらがなカタカナ한글漢字mix中文English中文123中文! 中 中文，句子。「引用」ㄅㄆㄇ…“x”—、",
    "$100 + €20 <= £5 ~ ^_^ `code` |pipe| = == => -> ≠ ∞ √2 x² ¬a © ® ™ § ¶ † • … ‰",
    "<sentinel:12> IMGIMGABZ     four    two  <x> a_b __init__ --flag #tag @name name@mail.com",
    "a<tool> b<tool><s>c </s> <unk>d",
    "(a|b) .,!? … 。，、।۔، end.Next,word!ok?yes",
    "ab" * 50 + " " * 20 + "9" * 40 + "\n" * 9 + "!" * 33,
]


def random_texts() -> list[str]:
    """Return texts of characters from all over Unicode, in runs, with spaces and newlines."""
    draw = random.Random(1)
    texts = []
    for _ in range(NUM_RANDOM):
        runs = []
        for _ in range(draw.randint(2, 9)):
            low, high = draw.choice(RANGES)
            runs.append("".join(chr(draw.randint(low, high)) for _ in range(draw.randint(1, 6))))
            runs.append(
                draw.choice(["", "", " ", "  ", "\n", " \n\n", "\t", "'s", "'LL", "12", "3456"])
            )
        texts.append("".join(runs).replace("\u0378", ""))
    return texts


def train(texts: list[str], pre: Any, alphabet: list[str]) -> tuple[list[str], list[list[str]]]:
    """Return the tokens and the merges of a vocabulary that crosses every border."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + NUM_MERGES, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    return sorted(vocab, key=vocab.__getitem__), model["merges"]


def byte_level(texts: list[str]) -> dict[str, Any]:
    """Return the metadata of a byte-level vocabulary, whatever its `pre`."""
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens, merges = train(texts, pre, sorted(pre.alphabet()))
    tokens += ["<s>", "</s>"]
    return {
        "model": "gpt2",
        "tokens": tokens,
        "merges": [" ".join(merge) for merge in merges],
        "token_type": [NORMAL] * (len(tokens) - 2) + [CONTROL] * 2,
        "bos_token_id": len(tokens) - 2,
        "eos_token_id": len(tokens) - 1,
    }


def with_bars(texts: list[str]) -> dict[str, Any]:
    """Return the metadata of a vocabulary in SentencePiece's spelling, with merges and scores."""
    spelled = [text.replace(" ", "▁") for text in texts]
    tokens, merges = train(spelled, pre_tokenizers.Split("\n", "isolated"), ["▁", "\n"])
    special = ["<unk>", "<s>", "</s>", "<tool>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return {
        "tokens": special + tokens,
        "merges": [" ".join(merge) for merge in merges],
        "scores": [0.0] * len(special) + [-float(rank) for rank in range(len(tokens))],
        "token_type": [UNKNOWN, CONTROL, CONTROL, USER_DEFINED, *[BYTE] * 256]
        + [NORMAL] * len(tokens),
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def write(path: Path, fields: dict[str, Any]) -> None:
    """Write a file that has a vocabulary and no weights."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in fields.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def ids_of_llama_cpp(fields: dict[str, Any], texts: list[str]) -> list[list[int]]:
    """Return the ids of each text under BOS, by llama.cpp."""
    import llama_cpp

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocab.gguf"
        write(path, fields)
        model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        return [model.tokenize(text.encode(), add_bos=True, special=True) for text in texts]


def main() -> None:
    """Write the record."""
    texts = [
        text.replace("\0", "") for text in (*TEXTS, *random_texts())
    ]  # ends llama.cpp's tokens
    kinds = {"bytes": byte_level(texts), "bars": with_bars(texts[: len(TEXTS)])}
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        **{pre: ("bytes", {"pre": pre}) for pre in PRE_TOKENIZERS},
        **{pre: ("bars", {"model": "gpt2", "pre": pre}) for pre in UTF8_BPE},
        "gemma4 by its model": ("bars", {"model": "gemma4", "add_bos_token": False}),
        "llama": ("bars", {"model": "llama"}),
        "llama without a prefix": ("bars", {"model": "llama", "add_space_prefix": False}),
    }
    found: list[list[list[int]]] = [[] for _ in texts]  # the different ones of each text
    record: dict[str, Any] = {"kinds": kinds, "texts": texts, "cases": {}, "ids": found}
    for name, (kind, fields) in cases.items():
        ids = ids_of_llama_cpp({**kinds[kind], **fields}, texts)
        places = []
        for one, different in zip(ids, found, strict=True):
            if one not in different:
                different.append(one)
            places.append(different.index(one))
        record["cases"][name] = {"kind": kind, "fields": fields, "ids": places}
        print(name, file=sys.stderr)
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(record, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
