"""One set of weights in every format that is compared: the demo model's, rounded to bf16.

The demo model is stored as Q4_1, which decodes to numbers that bf16 cannot always hold. They are
rounded once. The folder and the BF16 file hold the rounded numbers, and the others hold them
quantized again. All matrices of a file have its format, the embedding included. Files are made
once, in a cache folder.
"""

import os
from pathlib import Path

import gguf
import msgspec
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Quantization

from headrace.config.model_card import HOW_TO_GET_ONE, find_demo_model
from headrace.model.tokenizer_json import read_tokenizer_json

NAME = "smollm2-135m"
ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "headrace-bench"
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WRITTEN_BY_WRITER = {"general.architecture", "general.file_type", "general.quantization_version"}


def demo_model() -> Path:
    """Return the demo model's file, or end the program."""
    path = find_demo_model()
    if path is None:
        raise SystemExit(HOW_TO_GET_ONE)
    return path


def model_file(format: str) -> Path:
    """Return the .gguf file whose matrices are all `format`; "Q4_1" is the demo model itself."""
    if format == "Q4_1":
        return demo_model()
    return in_format(demo_model(), CACHE / f"{NAME}.{format}.gguf", Quantization[format])


def in_format(source: Path, path: Path, format: Quantization) -> Path:
    """Return a .gguf file with its matrices in another format; it is made once."""
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        write_gguf(source, unfinished, format)
        unfinished.rename(path)
    return path


def in_bf16(source: Path) -> Path:
    """Return a .gguf file with the same weights in bf16; it is made once."""
    return in_format(source, source.with_suffix(".bf16.gguf"), Quantization.BF16)


def model_folder() -> Path:
    """Return the Hugging Face folder with the bf16 weights."""
    path = CACHE / NAME
    if not path.exists():
        unfinished = CACHE / f"{NAME}.unfinished"
        write_folder(demo_model(), unfinished)
        unfinished.rename(path)
    return path


def write_gguf(source: Path, path: Path, format: Quantization) -> None:
    """Copy a .gguf file with its matrices in another format."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture, use_temp_file=True)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in WRITTEN_BY_WRITER:
            continue
        kind, *items = field.types
        writer.add_key_value(
            field.name, field.contents(), kind, sub_type=items[-1] if items else None
        )
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{format.name}"])
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, numbers)
            continue
        data = gguf.quants.quantize(rounded(numbers), format)
        writer.add_tensor(tensor.name, data, raw_dtype=format)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rounded(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Round to bf16, ties to even."""
    bf16 = gguf.quants.quantize(numbers, Quantization.BF16)
    return gguf.quants.dequantize(bf16, Quantization.BF16)


def write_folder(source: Path, folder: Path) -> None:
    """Save a .gguf file of a Llama with a tied head as a Hugging Face folder in bf16."""
    import torch
    import transformers

    reader = gguf.GGUFReader(source)
    values = {field.name: field.contents() for field in reader.fields.values()}
    heads = values["llama.attention.head_count"]
    kv_heads = values["llama.attention.head_count_kv"]
    config = transformers.LlamaConfig(
        vocab_size=values["llama.vocab_size"],
        hidden_size=values["llama.embedding_length"],
        intermediate_size=values["llama.feed_forward_length"],
        num_hidden_layers=values["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=values["llama.context_length"],
        rms_norm_eps=values["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": values["llama.rope.freq_base"]},
        bos_token_id=values["tokenizer.ggml.bos_token_id"],
        eos_token_id=values["tokenizer.ggml.eos_token_id"],
        tie_word_embeddings=True,
    )
    state = {}
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            numbers = unpaired(numbers, heads if "attn_q" in tensor.name else kv_heads)
        state[hugging_face_name(tensor.name)] = torch.from_numpy(numbers.copy())
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    model.bfloat16().save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(read_tokenizer_json(source))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": values["tokenizer.ggml.tokens"][config.eos_token_id],
        "chat_template": values["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))


def unpaired(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undo what llama.cpp's converter does to queries and keys: rotated pairs side by side."""
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def hugging_face_name(name: str) -> str:
    """Return a Llama tensor's name in a Hugging Face folder."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    return {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[parts[0]] + ".weight"


def text_tokens(num_tokens: int, file: Path | None = None) -> list[int]:
    """Return the first tokens of a real text, this repository's license, over and over.

    Args:
        file: the model whose tokenizer is used; None is the demo model.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(read_tokenizer_json(file or demo_model()).decode())
    ids: list[int] = tokenizer.encode((ROOT / "LICENSE").read_text()).ids
    return (ids * (num_tokens // len(ids) + 1))[:num_tokens]
