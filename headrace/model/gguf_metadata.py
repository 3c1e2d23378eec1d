"""The part of a GGUF file's metadata that both the worker and the processes around it need."""

from collections.abc import Container, Mapping, Sequence

import msgspec

from headrace.model.string_array import StringArray

LONG_ROPE = "rope_factors_long.weight"
# Texts that end an answer, where a file has them as control tokens. Files name one end, or two;
# models' generation configs name more (Phi-3: <|end|>, Gemma 3: <end_of_turn>).
END_TEXTS = {
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<turn|>",
    "<end_of_utterance>",
    "<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<|return|>",
    "<|call|>",
}
# tokenizer.ggml.token_type, as SentencePiece numbers them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


class GgufVocabulary(msgspec.Struct, rename={"model_name": "general.name"}):
    """A GGUF file's `tokenizer.ggml.*`, and the model's name."""

    tokens: list[str] = []
    model: str | None = None
    pre: str = "default"
    merges: list[str] | None = None
    scores: list[float] | None = None
    token_type: list[int] = []
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    unknown_token_id: int | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    add_space_prefix: bool = True
    model_name: str = ""

    @property
    def special_tokens(self) -> list[str]:
        """The tokens that are no part of a text."""
        pairs = zip(self.tokens, self.token_type, strict=False)  # or no types at all
        return [token for token, kind in pairs if kind in (UNKNOWN, CONTROL)]


def vocabulary_of(metadata: Mapping[str, object]) -> Sequence[str] | None:
    """Return the vocabulary; None where there is none."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    return tokens if isinstance(tokens, list | StringArray) else None


def end_token_ids(metadata: Mapping[str, object]) -> tuple[int, ...]:
    """Return the tokens that end an answer: those that the file names come first.

    The others are control tokens whose text says so, unless one stands for unknown text. Beside
    `<|return|>`, `<|end|>` ends a message, and more of the answer follows (gpt-oss).
    """
    named = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    tokens, kinds = vocabulary_of(metadata), metadata.get("tokenizer.ggml.token_type")
    ends: dict[str, int] = {}
    if tokens is not None and isinstance(kinds, list):
        pairs = enumerate(zip(tokens, kinds, strict=False))
        ends = {text: id for id, (text, kind) in pairs if kind == CONTROL and text in END_TEXTS}
    if "<|return|>" in ends:
        ends.pop("<|end|>", None)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    by_text = [id for id in ends.values() if id != unknown]
    limit = 1 << 31 if tokens is None else len(tokens)
    by_name = [id for id in named if isinstance(id, int) and 0 <= id < limit]
    return tuple(dict.fromkeys(by_name + by_text))


def trained_length(metadata: Mapping[str, object], tensors: Container[str]) -> int | None:
    """Return the number of positions before those that the model computes by another rule.

    LongRoPE takes other frequencies in longer texts. None if all positions follow one rule.
    """
    architecture = metadata.get("general.architecture")
    length = metadata.get(f"{architecture}.rope.scaling.original_context_length")
    return length if LONG_ROPE in tensors and isinstance(length, int) and length > 0 else None
