"""The part of a GGUF file's metadata that both the worker and the processes around it need."""

from collections.abc import Container, Mapping

LONG_ROPE = "rope_factors_long.weight"
# Texts that end an answer, where a file has them as control tokens; llama.cpp finds them so, too.
# Files name one end, or two; models' generation configs name more (Phi-3: <|end|>).
END_TEXTS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>"),
        *("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<EOT>", "[EOT]"),
        *("<end_of_turn>", "<turn|>", "<end_of_utterance>"),
    }
)
CONTROL = 3  # in tokenizer.ggml.token_type


def end_token_ids(metadata: Mapping[str, object]) -> tuple[int, ...]:
    """Return the tokens that end an answer: those that the file names come first.

    The others are control tokens whose text says so, unless one stands for unknown text. Beside
    `<|return|>`, `<|end|>` ends a message only, and more of the answer follows.
    """
    named = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    tokens, kinds = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if not isinstance(tokens, list):
        return ()
    ids = [id for id in named if isinstance(id, int) and 0 <= id < len(tokens)]
    if isinstance(kinds, list):
        pairs = enumerate(zip(tokens, kinds, strict=False))
        control = {text: id for id, (text, kind) in pairs if kind == CONTROL}
        if "<|return|>" in control:
            control.pop("<|end|>", None)
        unknown = metadata.get("tokenizer.ggml.unknown_token_id")
        ids += [id for text, id in control.items() if text in END_TEXTS and id != unknown]
    return tuple(dict.fromkeys(ids))


def trained_length(metadata: Mapping[str, object], tensors: Container[str]) -> int | None:
    """Return the number of positions before those that the model computes by another rule.

    LongRoPE takes other frequencies in longer texts, Ministral 3 other scales of its scores.
    None if all positions follow one rule.
    """
    architecture = metadata.get("general.architecture")
    length = metadata.get(f"{architecture}.rope.scaling.original_context_length")
    changes = LONG_ROPE in tensors or metadata.get(f"{architecture}.attention.temperature_scale")
    return length if changes and isinstance(length, int) else None
