"""Small GGUF files, written by the `gguf` package: whole decoders of one layer."""

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Quantization

from headrace.model.string_array import StringArray

HIDDEN, NUM_HEADS, NUM_KV_HEADS, CONTEXT = 32, 2, 1, 64
TOKENS = ["<unk>", "<s>", "</s>", *"abcdefgh", "ab", "cd", "abcd", "Ġ", "Ġa", "▁", "▁a", "<0x41>"]
TYPES = [2, 3, 3, *[1] * (len(TOKENS) - 3)]
MATRICES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (HIDDEN, HIDDEN),
    "ffn_up": (HIDDEN, HIDDEN),
    "ffn_down": (HIDDEN, HIDDEN),
}


def write_decoder(
    path: Path,
    architecture: str = "llama",
    tokenizer: str = "gpt2",
    types: Sequence[Quantization] = (Quantization.Q4_0, Quantization.Q8_0, Quantization.F16),
    **options: Any,
) -> None:
    """Write a decoder whose matrices have the types, one after the other.

    Args:
        options: of `gguf.GGUFWriter`, such as `split_max_tensors`.
    """
    writer = gguf.GGUFWriter(path, architecture, **options)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    write_tokenizer(writer, tokenizer)
    for name, numbers, kind in tensors(types, has_biases=architecture == "qwen2"):
        data = gguf.quantize(numbers, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    finish(writer)


def write_tokenizer(writer: gguf.GGUFWriter, kind: str) -> None:
    """Add a vocabulary that either kind of tokenizer can use, and a chat template."""
    writer.add_tokenizer_model(kind)
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    if kind == "gpt2":
        writer.add_tokenizer_pre("llama-bpe")
        writer.add_token_merges(["a b", "c d", "ab cd", "Ġ a"])
    else:
        writer.add_token_scores([-float(place) for place in range(len(TOKENS))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages }}")


def tensors(
    types: Sequence[Quantization], *, has_biases: bool
) -> Iterable[tuple[str, Any, Quantization]]:
    """Yield each tensor of the decoder, its numbers and its type."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(TOKENS), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        **{f"blk.0.{name}.weight": shape for name, shape in MATRICES.items()},
    }
    if has_biases:
        shapes |= {f"blk.0.attn_{part}.bias": MATRICES[f"attn_{part}"][:1] for part in "qkv"}
    for place, (name, shape) in enumerate(shapes.items()):
        numbers = rng.standard_normal(shape, np.float32) * np.float32(0.05)
        kind = types[place % len(types)] if len(shape) > 1 else Quantization.F32
        yield name, numbers, kind


def finish(writer: gguf.GGUFWriter) -> None:
    """Write what has been added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


TableEntry = tuple[str, int, tuple[int, ...], int]  # name, type, shape with rows first, offset


def serialized(metadata: dict[str, Any], tensors: Sequence[TableEntry], data: bytes) -> bytes:
    """Return a file of any content, right or wrong; its tensors lie in `data`."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    head += b"".join(text(key) + typed(value) for key, value in metadata.items())
    for name, kind, shape, offset in tensors:
        dims = [*reversed(shape)]
        head += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return head + b"\0" * (-len(head) % 32) + data


def text(string: str) -> bytes:
    """Return a string behind its length."""
    data = string.encode(errors="replace")
    return struct.pack("<Q", len(data)) + data


def typed(value: Any) -> bytes:
    """Return a value behind its type. A list has the type of its first."""
    if isinstance(value, list | StringArray):
        of = [typed(item) for item in value if type(item) is type(value[0])]
        return (
            struct.pack("<I", 9)
            + (of[0][:4] if of else bytes(4))
            + struct.pack("<Q", len(of))
            + b"".join(item[4:] for item in of)
        )
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    kind, code = {bool: (7, "?"), float: (12, "d")}.get(type(value), (11, "q"))
    return struct.pack(f"<I{code}", kind, value)
