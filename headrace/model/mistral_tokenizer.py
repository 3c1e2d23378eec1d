"""The tokenizer files that mistral-common reads: `tekken.json`, `tokenizer.model.v3` and others.

The first has the bytes of each token, as tiktoken takes them; the others are SentencePiece's. Both
are read into what a GGUF file holds. Their special tokens are no part of a text: mistral-common
writes them by id.
"""

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from headrace.errors import BAD_JSON, ModelError
from headrace.model.gguf_metadata import CONTROL, NORMAL, GgufVocabulary
from headrace.model.pre_tokenizers import PreTokenizer
from headrace.model.token_table import byte_characters

TEKKEN = "tekken.json"
SENTENCE_PIECE = re.compile(r".*\.model\.v\d+(m\d+)?")
# Special tokens of a tekken.json that names none.
OLD_SPECIAL = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] "
    "[/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] "
    "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
)
IMAGE_MARKS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")  # of a token, between lines, at the end
BPE = 2  # of SentencePiece's `model_type`


class TekkenToken(msgspec.Struct):
    """An ordinary token; the first ones merge first."""

    token_bytes: bytes


class TekkenSpecialToken(msgspec.Struct):
    """A special token; its place in the list is its id."""

    token_str: str


class TekkenConfig(msgspec.Struct):
    """How texts are cut, and how many tokens there are."""

    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


Positive = Annotated[int, msgspec.Meta(ge=1)]


class ImageLimits(msgspec.Struct):
    """How images become tokens: pixels of a patch and of a side, and patches of a token's side."""

    image_patch_size: Positive
    max_image_size: Positive
    spatial_merge_size: Positive = 1


class TekkenFile(msgspec.Struct):
    """The relevant part of a `tekken.json`."""

    config: TekkenConfig
    vocab: list[TekkenToken]
    special_tokens: list[TekkenSpecialToken] | None = None


class TekkenImages(msgspec.Struct):
    """The part of a `tekken.json` that is about images, under either name."""

    image: ImageLimits | None = None
    multimodal: ImageLimits | None = None


def find_mistral_tokenizer(folder: Path) -> Path | None:
    """Return the file of a folder that mistral-common reads: the newest, if there is one."""
    if (folder / TEKKEN).is_file():
        return folder / TEKKEN
    return max(filter(is_mistral_tokenizer, folder.glob("*.model.v*")), default=None)


def is_mistral_tokenizer(path: Path) -> bool:
    """Whether a file is one of those that mistral-common reads, by its name."""
    return path.name == TEKKEN or SENTENCE_PIECE.fullmatch(path.name) is not None


def read_mistral_vocabulary(path: Path) -> tuple[GgufVocabulary, PreTokenizer | None]:
    """Return the vocabulary of a file, and how it cuts texts where they are bytes.

    Raises:
        ModelError: it cannot be read, or is not what its name says.
    """
    try:
        data = path.read_bytes()
        return tekken_vocabulary(data) if path.name == TEKKEN else (piece_vocabulary(data), None)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (*BAD_JSON, IndexError, KeyError, TypeError, struct.error) as error:
        raise ModelError(f"{path}: not a tokenizer of its name: {error}") from None
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def has_processor(folder: Path) -> bool:
    """Whether a file of a folder describes its image processor, as transformers has it."""
    return any((folder / f"{kind}_config.json").exists() for kind in ("preprocessor", "processor"))


def read_image_limits(folder: Path) -> ImageLimits | None:
    """Return what a folder's `tekken.json` says of images, if it has one that does.

    Raises:
        ModelError: it cannot be read.
    """
    path = folder / TEKKEN
    if not path.is_file():
        return None
    try:
        found = msgspec.json.decode(path.read_bytes(), type=TekkenImages)
    except (OSError, *BAD_JSON) as error:
        raise ModelError(f"{path}: what it says of images cannot be read: {error}") from None
    return found.image or found.multimodal


def tekken_vocabulary(data: bytes) -> tuple[GgufVocabulary, PreTokenizer]:
    """Return the vocabulary of a `tekken.json`; special tokens come first, unnamed ones too."""
    file = msgspec.json.decode(data, type=TekkenFile)
    special = OLD_SPECIAL.split()
    if file.special_tokens is not None:
        special = [token.token_str for token in file.special_tokens]
    size, num_special = file.config.default_vocab_size, file.config.default_num_special_tokens
    special += [f"<SPECIAL_{id}>" for id in range(len(special), num_special)]
    if len(special) != num_special or not num_special < size <= num_special + len(file.vocab):
        raise ModelError(
            f"default_vocab_size is {size} for {len(special)} special tokens and "
            f"{len(file.vocab)} others; it is not more than both together"
        )
    ordinary = [token.token_bytes for token in file.vocab[: size - num_special]]
    written = dict(enumerate(byte_characters()))
    spelled = [token.decode("latin-1").translate(written) for token in ordinary]
    if len({*special, *spelled}) != size:
        raise ModelError("two of its tokens are the same")
    vocabulary = GgufVocabulary(
        tokens=[*special, *spelled],
        scores=[-float(id) for id in range(size)],  # what comes first is merged first
        token_type=[CONTROL] * num_special + [NORMAL] * len(spelled),
        bos_token_id=special.index("<s>") if "<s>" in special else None,
        eos_token_id=special.index("</s>") if "</s>" in special else None,
    )
    return vocabulary, PreTokenizer((file.config.pattern,), ignore_merges=True)


def piece_vocabulary(data: bytes) -> GgufVocabulary:
    """Return the vocabulary of a SentencePiece model, a `ModelProto`."""
    pieces: list[dict[int, Any]] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in fields_of(data):
        if number == 1:
            pieces.append(dict(fields_of(value)))
        elif number == 2:
            trainer = dict(fields_of(value))
        elif number == 3:
            normalizer = dict(fields_of(value))
    if trainer.get(3) != BPE or normalizer.get(4, 1) or normalizer.get(2):
        raise ModelError("a SentencePiece model that is no BPE, or that changes texts")
    return GgufVocabulary(
        model="llama",
        tokens=[piece[1].decode() for piece in pieces],
        scores=[piece.get(2, 0.0) for piece in pieces],
        token_type=[piece.get(3, NORMAL) for piece in pieces],
        unknown_token_id=trainer.get(40, 0),
        bos_token_id=trainer.get(41, 1),
        eos_token_id=trainer.get(42, 2),
        add_space_prefix=bool(normalizer.get(3, 1)),
    )


def fields_of(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protobuf message by number: integers, floats and bytes.

    Raises:
        ModelError: a field has another wire type, or ends after the message.
    """
    at = 0
    while at < len(message):
        tag, at = varint(message, at)
        match tag & 7:
            case 0:
                value, at = varint(message, at)
                yield tag >> 3, value
            case 2:
                size, at = varint(message, at)
                if at + size > len(message):
                    raise ModelError("a field ends after the file")
                yield tag >> 3, message[at : at + size]
                at += size
            case 5:
                yield tag >> 3, struct.unpack_from("<f", message, at)[0]
                at += 4
            case kind:
                raise ModelError(f"a field has wire type {kind}")


def varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number at a place of a message, seven bits a byte, and the place after it."""
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
