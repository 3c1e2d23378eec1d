"""GGUF files of random weights, all matrices of one type: each layer is the first one again.

The smallest has 420 million numbers. Others have all layers of a model that people run. Mixtures of
experts have some, as many as fit into 3 GB of Q8_0. A large file has as many as make it large.

The `gguf` package quantizes to few types, and real files mix them. A kernel's speed depends on the
type alone, so blocks are random bytes with scales that make numbers of about a trained size.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from support.models import CACHE, demo_model

VOCAB = 49152  # the demo model's


@dataclass(frozen=True)
class DenseShape:
    """The sizes of a Llama, or of what differs from it in biases alone."""

    architecture: str  # of GGUF
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    layers: int
    vocab: int = VOCAB
    tied_head: bool = True
    rope_base: float = 10_000.0

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Return the shapes of a layer's matrices."""
        kv = self.kv_heads * self.hidden // self.heads
        return {
            "attn_q": (self.hidden, self.hidden),
            "attn_k": (kv, self.hidden),
            "attn_v": (kv, self.hidden),
            "attn_output": (self.hidden, self.hidden),
            "ffn_gate": (self.mlp, self.hidden),
            "ffn_up": (self.mlp, self.hidden),
            "ffn_down": (self.hidden, self.mlp),
        }

    def vectors(self) -> dict[str, int]:
        """Return the lengths of a layer's vectors."""
        vectors = dict.fromkeys(("attn_norm.weight", "ffn_norm.weight"), self.hidden)
        if self.architecture == "qwen2":
            names = ("attn_q", "attn_k", "attn_v")
            vectors |= {f"{name}.bias": self.matrices()[name][0] for name in names}
        return vectors


SMALLEST = DenseShape("llama", 1536, 8960, 12, 2, 8)
DENSE = {
    "qwen2.5-1.5b": DenseShape("qwen2", 1536, 8960, 12, 2, 28, 151936, True, 1_000_000.0),
    "llama-3.1-8b": DenseShape("llama", 4096, 14336, 32, 8, 32, 128256, False, 500_000.0),
}


@dataclass(frozen=True)
class MixtureShape:
    """The sizes of a model with experts; `layers` of them, not all."""

    architecture: str  # of GGUF
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    experts: int
    experts_per_token: int
    expert_mlp: int

    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a layer's matrices."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "attn_q": (q, self.hidden),
            "attn_k": (kv, self.hidden),
            "attn_v": (kv, self.hidden),
            "attn_output": (self.hidden, q),
            "ffn_gate_exps": (self.experts, self.expert_mlp, self.hidden),
            "ffn_up_exps": (self.experts, self.expert_mlp, self.hidden),
            "ffn_down_exps": (self.experts, self.hidden, self.expert_mlp),
        }

    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what a layer has in F32."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        vectors: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (self.hidden,),
            "ffn_gate_inp.weight": (self.experts, self.hidden),
        }
        if self.architecture == "qwen3moe":
            norms = dict.fromkeys(("attn_q_norm.weight", "attn_k_norm.weight"), (self.head_dim,))
            vectors |= {"ffn_norm.weight": (self.hidden,), **norms}
        elif self.architecture == "gpt-oss":
            vectors |= {
                "post_attention_norm.weight": (self.hidden,),
                "attn_sinks.weight": (self.heads,),
                "attn_q.bias": (q,),
                "attn_k.bias": (kv,),
                "attn_v.bias": (kv,),
                "attn_output.bias": (self.hidden,),
                "ffn_gate_inp.bias": (self.experts,),
                "ffn_gate_exps.bias": (self.experts, self.expert_mlp),
                "ffn_up_exps.bias": (self.experts, self.expert_mlp),
                "ffn_down_exps.bias": (self.experts, self.hidden),
            }
        else:
            vectors["ffn_norm.weight"] = (self.hidden,)
        return vectors


MIXTURES = {
    "qwen3-30b-a3b": MixtureShape("qwen3moe", 2048, 32, 4, 128, 4, 128, 8, 768),
    "gpt-oss-20b": MixtureShape("gpt-oss", 2880, 64, 8, 64, 3, 32, 4, 2880),
    "mixtral-8x7b": MixtureShape("llama", 4096, 32, 8, 128, 2, 8, 2, 14336),
}
LARGE = "qwen3-30b-a3b"  # of large files
RMS = 0.02  # of weights
# Where a block has its scales in fp16; ggml's layout. MXFP4 has an exponent of 8 bits instead.
SCALES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)},
}
TYPES = (*SCALES, "MXFP4")

Bytes = npt.NDArray[np.uint8]


def random_file(name: str) -> Path:
    """Return the file of one of `TYPES`, or of a shape and a type, made where it is not there."""
    shape, _, type = name.rpartition("-")
    path = CACHE / f"random.{name}.gguf"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        if shape in MIXTURES:
            write_mixture(unfinished, GGMLQuantizationType[type], MIXTURES[shape])
        else:
            write(unfinished, GGMLQuantizationType[type], DENSE[shape] if shape else SMALLEST)
        unfinished.rename(path)
    return path


def large_file(gib: float, type: str) -> Path:
    """Return a file of this size, made where it is not there: with the demo model's tokenizer."""
    path = CACHE / f"random.{LARGE}-{gib:g}-GiB-{type}.gguf"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        shape, quantization = MIXTURES[LARGE], GGMLQuantizationType[type]
        numbers, size = GGML_QUANT_SIZES[quantization]
        layer = sum(math.prod(matrix) for matrix in shape.matrices().values()) // numbers * size
        outside = 2 * VOCAB * shape.hidden // numbers * size
        layers = round((gib * 2**30 - outside) / layer)
        write_mixture(unfinished, quantization, replace(shape, layers=layers), demo_model())
        unfinished.rename(path)
    return path


def types_of(shape: str) -> list[str]:
    """Return the types that the rows of a shape can have, of those that are compared."""
    sizes = DENSE[shape] if shape in DENSE else MIXTURES[shape]
    widths = {matrix[-1] for matrix in sizes.matrices().values()}
    types = ("Q8_0", "Q4_0", "Q4_K", "Q6_K" if shape in DENSE else "MXFP4")
    numbers = {type: GGML_QUANT_SIZES[GGMLQuantizationType[type]][0] for type in types}
    return [type for type in types if not any(width % numbers[type] for width in widths)]


def random_rows(shape: tuple[int, ...], type: GGMLQuantizationType) -> Bytes:
    """Return rows of random blocks, [rows, bytes of a row], or more dimensions of rows."""
    numbers, size = GGML_QUANT_SIZES[type]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (math.prod(shape) // numbers, size), np.uint8)
    if type.name == "MXFP4":
        blocks[:, 0] = 119  # 2 ** -8 of at most 6
        return blocks.reshape(*shape[:-1], -1)
    for scale in (np.float16(1), None):
        if scale is None:  # scales of one have told how large the numbers are
            sample = gguf.dequantize(blocks[:4096].reshape(1, -1), type)
            scale = np.float16(RMS / np.sqrt(np.square(sample).mean()))
        for place in SCALES[type.name]:
            blocks[:, place : place + 2] = np.array([scale], "<f2").view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write(path: Path, type: GGMLQuantizationType, shape: DenseShape) -> None:
    """Write a dense model without a tokenizer."""
    writer = gguf.GGUFWriter(path, shape.architecture, use_temp_file=False)
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.mlp)
    writer.add_block_count(shape.layers)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("none")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_tensor("output_norm.weight", np.ones(shape.hidden, np.float32))
    embedding = random_rows((shape.vocab, shape.hidden), type)
    for name in ("token_embd",) if shape.tied_head else ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", embedding, raw_dtype=type)
    matrices = {name: random_rows(size, type) for name, size in shape.matrices().items()}
    for layer in range(shape.layers):
        for name, length in shape.vectors().items():
            numbers = np.full(length, name.endswith("norm.weight"), np.float32)
            writer.add_tensor(f"blk.{layer}.{name}", numbers)
        for name, rows in matrices.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", rows, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_mixture(
    path: Path, type: GGMLQuantizationType, shape: MixtureShape, tokenizer: Path | None = None
) -> None:
    """Write a mixture of experts, with the tokenizer of another file, or without one."""
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.expert_mlp)
    if shape.architecture != "llama":  # converters write it of no Mixtral
        writer.add_expert_feed_forward_length(shape.expert_mlp)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.experts_per_token)
    writer.add_block_count(shape.layers)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    if shape.architecture == "gpt-oss":
        writer.add_sliding_window(128)
    writer.add_vocab_size(VOCAB)
    if tokenizer is None:
        writer.add_tokenizer_model("none")
    else:
        copy_tokenizer(tokenizer, writer)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    rng = np.random.default_rng(1)
    for name in ("token_embd", "output"):
        rows = random_rows((VOCAB, shape.hidden), type)
        writer.add_tensor(f"{name}.weight", rows, raw_dtype=type)
    writer.add_tensor("output_norm.weight", np.ones(shape.hidden, np.float32))
    experts = {name: random_rows(size, type) for name, size in shape.matrices().items()}
    for layer in range(shape.layers):
        for name, size in shape.vectors().items():
            numbers = rng.standard_normal(size, np.float32) * np.float32(RMS)
            if name.endswith("norm.weight"):
                numbers = np.ones(size, np.float32)
            writer.add_tensor(f"blk.{layer}.{name}", numbers)
        for name, rows in experts.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", rows, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def copy_tokenizer(source: Path, writer: gguf.GGUFWriter) -> None:
    """Copy the tokenizer of a .gguf file."""
    for field in gguf.GGUFReader(source).fields.values():
        if field.name.startswith("tokenizer."):
            kind, *items = field.types
            last = items[-1] if items else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=last)
