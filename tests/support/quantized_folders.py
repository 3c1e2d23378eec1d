"""Tiny checkpoints in the formats of quantizers, and the same models decoded.

Packed word by word, as the formats are defined: slow, and nothing like how they are read.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INNER, VOCAB = 64, 128, 96
CONFIG: dict[str, Any] = {
    "model_type": "qwen2",  # biases of q, k and v
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 7,
}
LAYER = "model.layers.0."
MATRICES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each nibble of a word holds, lowest first


class Int4(NamedTuple):
    """A matrix of 4 bits: a number is (code - zero) * scale of its column's group."""

    codes: Tensor  # [rows, columns]
    zeros: Tensor  # [rows, groups]
    scales: Tensor  # [rows, groups], fp16
    group_of: Tensor  # [columns]

    def decoded(self) -> Tensor:
        zeros, scales = self.zeros[:, self.group_of], self.scales[:, self.group_of].float()
        return (self.codes - zeros).float() * scales


def random_int4(shape: tuple[int, int], group_size: int, *, sym: bool, act: bool = False) -> Int4:
    """Return a matrix of random codes; with `act`, groups are columns from anywhere."""
    num_rows, num_columns = shape
    size = num_columns if group_size == -1 else group_size
    num_groups = num_columns // size
    order = torch.randperm(num_columns) if act else torch.arange(num_columns)
    group_of = torch.empty(num_columns, dtype=torch.int32)
    group_of[order] = (torch.arange(num_columns) // size).int()
    drawn = torch.randint(1, 16, (num_rows, num_groups))
    return Int4(
        codes=torch.randint(0, 16, shape),
        zeros=torch.full_like(drawn, 8) if sym else drawn,
        scales=(0.01 + 0.02 * torch.rand(num_rows, num_groups)).half(),
        group_of=group_of,
    )


def pack(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack [rows, columns] to [rows, columns / 8] words, the first of `order` lowest."""
    words = torch.zeros(len(codes), codes.shape[1] // 8, dtype=torch.int64)
    for nibble, column in enumerate(order):
        words |= codes[:, column::8].long() << (4 * nibble)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def awq(matrix: Int4) -> dict[str, Tensor]:
    return {
        "qweight": pack(matrix.codes.T, AWQ_ORDER),
        "qzeros": pack(matrix.zeros.T, AWQ_ORDER),
        "scales": matrix.scales.T.contiguous(),
    }


def gptq(matrix: Int4, taken_from_zeros: int = 1) -> dict[str, Tensor]:
    return {
        "qweight": pack(matrix.codes).T.contiguous(),
        "qzeros": pack(matrix.zeros.T - taken_from_zeros),
        "scales": matrix.scales.T.contiguous(),
        "g_idx": matrix.group_of,
    }


def gptq_v2(matrix: Int4) -> dict[str, Tensor]:
    return gptq(matrix, 0)


def compressed(matrix: Int4) -> dict[str, Tensor]:
    tensors = {
        "weight_packed": pack(matrix.codes),
        "weight_scale": matrix.scales,
        "weight_shape": torch.tensor(matrix.codes.shape),
    }
    if (matrix.zeros != 8).any():
        tensors["weight_zero_point"] = pack(matrix.zeros.T).T.contiguous()
    return tensors


def write_folder(
    folder: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any] | None = None
) -> Path:
    """Write tensors and a config."""
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE)
    config = CONFIG if settings is None else CONFIG | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


FILE = "model.safetensors"


def plain_tensors() -> dict[str, Tensor]:
    """Return the unquantized tensors."""
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN) * 0.15,
        "model.norm.weight": 1 + 0.1 * torch.randn(HIDDEN),
        f"{LAYER}input_layernorm.weight": 1 + 0.1 * torch.randn(HIDDEN),
        f"{LAYER}post_attention_layernorm.weight": 1 + 0.1 * torch.randn(HIDDEN),
    }
    for name in ("q_proj", "k_proj", "v_proj"):
        rows = MATRICES[f"self_attn.{name}"][0]
        tensors[f"{LAYER}self_attn.{name}.bias"] = 0.1 * torch.randn(rows)
    return tensors


def int4_tensors(
    packed: Callable[[Int4], dict[str, Tensor]], group_size: int, *, sym: bool, act: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of a quantized model, and the decoded ones."""
    torch.manual_seed(0)
    quantized, decoded = plain_tensors(), {}
    decoded |= quantized
    for name, shape in MATRICES.items():
        matrix = random_int4(shape, group_size, sym=sym, act=act)
        decoded[f"{LAYER}{name}.weight"] = matrix.decoded()
        quantized |= {f"{LAYER}{name}.{part}": t for part, t in packed(matrix).items()}
    return quantized, decoded


def fp8_tensors(kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return as `int4_tensors` does, of fp8 with a scale by "tensor", "channel" or "block"."""
    torch.manual_seed(0)
    quantized, decoded = plain_tensors(), {}
    decoded |= quantized
    for name, (num_rows, num_columns) in MATRICES.items():
        codes = (torch.randn(num_rows, num_columns) * 40).to(torch.float8_e4m3fn)
        shape = {
            "tensor": (1,),
            "channel": (num_rows, 1),
            "block": (-(-num_rows // 128), -(-num_columns // 128)),
        }[kind]
        scales = 0.001 + 0.003 * torch.rand(shape)
        spread = scales.expand(num_rows, -1) if kind == "channel" else scales
        if kind == "block":
            spread = scales.repeat_interleave(128, 0)[:num_rows]
            spread = spread.repeat_interleave(128, 1)[:, :num_columns]
        part = "weight_scale_inv" if kind == "block" else "weight_scale"
        quantized |= {f"{LAYER}{name}.weight": codes, f"{LAYER}{name}.{part}": scales}
        decoded[f"{LAYER}{name}.weight"] = codes.float() * spread
    return quantized, decoded
