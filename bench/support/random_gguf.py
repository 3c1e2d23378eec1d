"""GGUF files of random weights: a model of 420 million numbers, all its matrices of one type.

The `gguf` package quantizes to few types, and real files mix them. A kernel's speed depends on the
type alone, so blocks are random bytes with scales that make numbers of about a trained size.
"""

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from support.models import CACHE

HIDDEN, MLP, HEADS, KV_HEADS, LAYERS, VOCAB = 1536, 8960, 12, 2, 8, 49152
HEAD_DIM = HIDDEN // HEADS
MATRICES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (MLP, HIDDEN),
    "ffn_up": (MLP, HIDDEN),
    "ffn_down": (HIDDEN, MLP),
}
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


def random_file(type: str) -> Path:
    """Return the file of one of `TYPES`, made where it is not there."""
    path = CACHE / f"random.{type}.gguf"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        write(unfinished, GGMLQuantizationType[type])
        unfinished.rename(path)
    return path


def random_rows(shape: tuple[int, int], type: GGMLQuantizationType) -> Bytes:
    """Return rows of random blocks, [rows, bytes of a row]."""
    numbers, size = GGML_QUANT_SIZES[type]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // numbers, size), np.uint8)
    if type.name == "MXFP4":
        blocks[:, 0] = 119  # 2 ** -8 of at most 6
        return blocks.reshape(shape[0], -1)
    for scale in (np.float16(1), None):
        if scale is None:  # scales of one have told how large the numbers are
            sample = gguf.dequantize(blocks[:4096].reshape(1, -1), type)
            scale = np.float16(RMS / np.sqrt(np.square(sample).mean()))
        for place in SCALES[type.name]:
            blocks[:, place : place + 2] = np.array([scale], "<f2").view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write(path: Path, type: GGMLQuantizationType) -> None:
    """Write a Llama without a tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("none")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    ones = np.ones(HIDDEN, np.float32)
    writer.add_tensor("output_norm.weight", ones)
    writer.add_tensor("token_embd.weight", random_rows((VOCAB, HIDDEN), type), raw_dtype=type)
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", ones)
        for name, shape in MATRICES.items():
            writer.add_tensor(
                f"blk.{layer}.{name}.weight", random_rows(shape, type), raw_dtype=type
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
