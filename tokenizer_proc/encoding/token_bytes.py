"""A lower bound of a text's tokens, from its bytes before it is encoded.

A token stands for so many bytes and no more. The bound holds only if every byte ends up in a token.
It does not hold if a normalizer strips, a pre-tokenizer removes spaces, added tokens absorb spaces,
or unknown characters are fused. Byte-level BPE, and SentencePiece's BPE with byte fallback, lose
nothing but the bytes that the vocabulary of the former lacks.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

# NFC shortens a text, at most from 7 bytes to 2: U+1FBE U+0308 U+0301 becomes U+0390.
NFC_SHRINKS = 4
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
KEEPING_SPLITS = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")

Step = dict[str, Any]


class TokenizerModel(msgspec.Struct):
    """The relevant part of `model`."""

    type: str = ""
    vocab: Any = None
    byte_fallback: bool = False


class AddedTokenEntry(msgspec.Struct):
    """The relevant part of an entry of `added_tokens`."""

    content: str
    lstrip: bool = False
    rstrip: bool = False


class Spec(msgspec.Struct):
    """The relevant part of a `tokenizer.json`."""

    model: TokenizerModel
    added_tokens: list[AddedTokenEntry] = []
    normalizer: Step | None = None
    pre_tokenizer: Step | None = None


DECODER = msgspec.json.Decoder(Spec)


@dataclass(frozen=True)
class TokenBytes:
    """Bounds on the number of a text's tokens, from its bytes."""

    longest: int  # no token stands for more bytes
    lost: bytes  # byte values that may vanish

    def fewest_tokens(self, text: str) -> int:
        """Return a number of tokens that `text` has, if not more."""
        return -(-len(text.encode().translate(None, self.lost)) // self.longest)


def read_token_bytes(data: bytes) -> TokenBytes | None:
    """Return the token bounds of a `tokenizer.json`; None if it allows none."""
    spec = DECODER.decode(data)
    normalizers = steps_of(spec.normalizer, "normalizers")
    pre_tokenizers = steps_of(spec.pre_tokenizer, "pretokenizers")
    shrinks = most_shrinking(normalizers)
    keeps = all(keeps_bytes(step) for step in pre_tokenizers)
    swallows = any(token.lstrip or token.rstrip for token in spec.added_tokens)
    vocab = spec.model.vocab
    if spec.model.type != "BPE" or shrinks is None or not keeps or swallows:
        return None
    lost = b""
    if any(step["type"] == "ByteLevel" for step in pre_tokenizers):
        longest = max(map(len, vocab))  # a character stands for a byte
        lost = bytes(byte for byte, written in byte_characters().items() if written not in vocab)
        if lost and normalizers:
            return None
    elif spec.model.byte_fallback and all(token in vocab for token in BYTE_TOKENS):
        longest = max(len(token.encode()) for token in vocab)
    else:
        return None
    added = max((len(token.content.encode()) for token in spec.added_tokens), default=0)
    return TokenBytes(max(longest, added) * shrinks, lost)


def steps_of(step: Step | None, name: str) -> list[Step]:
    """Return a step's parts, itself where it is no sequence; nothing is no steps."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [part for inner in step[name] for part in steps_of(inner, name)]


def most_shrinking(normalizers: list[Step]) -> int | None:
    """Return how many times shorter a text can get, or None where that is unknown."""
    factor = 1
    for step in normalizers:
        match step:
            case {"type": "NFC"}:
                factor *= NFC_SHRINKS
            case {"type": "Prepend"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                if len(new.encode()) < len(old.encode()):
                    return None
            case _:
                return None
    return factor


def keeps_bytes(pre_tokenizer: Step) -> bool:
    """Whether every byte of a text is still there after a step."""
    match pre_tokenizer:
        case {"type": "ByteLevel" | "Digits" | "Metaspace"}:
            return True
        case {"type": "Split", "behavior": behavior}:
            return behavior in KEEPING_SPLITS
        case _:
            return False


def byte_characters() -> dict[int, str]:
    """Return the characters in which byte-level BPE writes the 256 bytes, as GPT-2 chose them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(0x100 + i) for i, byte in enumerate(others)
    }
