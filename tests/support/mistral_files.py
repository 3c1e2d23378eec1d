"""Small tokenizer files that mistral-common reads, and those that it brings."""

import base64
import json
from pathlib import Path
from typing import Any

import mistral_common
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

DATA = Path(mistral_common.__file__).parent / "data"
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Overlapping tokens: which one is made depends on the order of merges.
MERGED = ("an", "na", "ana", "in", "ing", " a", " an", "ст", "ий", "水", "==", "ab", "aba")
NAMES = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] "
    "[/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] "
    "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT] [ARGS] [CALL_ID] [THINK] [/THINK] "
    "[MODEL_SETTINGS] [/MODEL_SETTINGS]"
)
SPECIAL = NAMES.split()
NUM_SPECIAL = 30
VOCAB_SIZE = NUM_SPECIAL + 256 + len(MERGED)
SETTINGS = {  # of version 15
    "reasoning_effort": {
        "type": "enum",
        "accepts_none": True,
        "default": "none",
        "values": ["none", "high"],
    }
}


def write_tekken(
    folder: Path, version: str = "v13", more: dict[str, Any] | None = None, **changes: Any
) -> Path:
    """Write a `tekken.json` of every byte and `MERGED`; `changes` are of its configuration."""
    tokens = [bytes([byte]) for byte in range(256)] + [token.encode() for token in MERGED]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    special = [
        {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(SPECIAL)
    ]
    config = {
        "pattern": PATTERN,
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": VOCAB_SIZE,
        "default_num_special_tokens": NUM_SPECIAL,
        "version": version,
    }
    content: dict[str, Any] = {
        "config": config | changes,
        "vocab": vocab,
        "special_tokens": special,
    }
    path = folder / "tekken.json"
    path.write_text(json.dumps(content | (more or {})))
    return path


def right_ids(file: Path | MistralTokenizer, body: dict[str, Any]) -> list[int]:
    """Return the prompt of a chat, as mistral-common encodes it."""
    tokenizer = MistralTokenizer.from_file(file) if isinstance(file, Path) else file
    request = ChatCompletionRequest.from_openai(**body)
    return tokenizer.encode_chat_completion(request).tokens
