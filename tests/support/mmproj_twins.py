"""Small random models that take images, as llama.cpp's converters write them: two GGUF files.

Projector files have the tensors and keys that the converter of llama-cpp-python 0.3.36 makes of the
same folders.
"""

import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import gguf_twins
import msgspec
import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from gguf import GGMLQuantizationType as Quantization
from gguf_files import serialized
from tiny_vision import BEGUN, make_vision_folder
from vision_templates import TEMPLATES

Floats = npt.NDArray[np.float32]
Stored = dict[str, Floats]
ALIGNMENT = 32
CONTROL = 3
PROJECTORS = {
    "smolvlm": "idefics3",
    "idefics3": "idefics3",
    "gemma3": "gemma3",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "llava": "mlp",
}
ARCHITECTURES = {
    "smolvlm": "llama",
    "idefics3": "llama",
    "gemma3": "gemma3",
    "qwen2_5_vl": "qwen2vl",
    "llava": "llama",
}
DECODER = ("lm_head.", "model.embed_tokens.", "model.layers.", "model.norm.")
OLDER = {  # names of LLaVA's weights
    "model.multi_modal_projector.": "multi_modal_projector.",
    "multi_modal_projector.linear_1": "mm.0",
    "multi_modal_projector.linear_2": "mm.2",
    "vision_tower.vision_model.embeddings.": "v.",
    "vision_tower.vision_model.encoder.layers.": "v.blk.",
    "vision_tower.vision_model.pre_layrnorm": "v.pre_ln",
    "class_embedding": "class_embd",
    "patch_embedding": "patch_embd",
    "position_embedding": "position_embd",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "mlp.fc1": "ffn_down",
    "mlp.fc2": "ffn_up",
}
TOWERS = ("vision", "visual", "multi_modal", "connector")  # parts of names


class Twins(NamedTuple):
    """A folder and two files of the same model."""

    model: Any
    folder: Path
    decoder: Path
    mmproj: Path


def make_twins(folder: Path, family: str) -> Twins:
    """Make a small model, and write it in both forms."""
    model = make_vision_folder(folder / family, family)
    return Twins(
        model,
        folder / family,
        write_decoder(folder / f"{family}.gguf", model, folder / family, family),
        write_mmproj(folder / f"mmproj-{family}.gguf", folder / family, family),
    )


def write_decoder(path: Path, model: Any, folder: Path, family: str) -> Path:
    """Write the decoder of a model, with its tokenizer."""
    architecture, config = ARCHITECTURES[family], model.config.get_text_config()
    state = {decoder_name(name): tensor for name, tensor in model.state_dict().items()}
    state = {name: tensor for name, tensor in state.items() if name.startswith(DECODER)}
    if not hasattr(config, "tie_word_embeddings"):
        config.tie_word_embeddings = model.config.tie_word_embeddings
    decoder = types.SimpleNamespace(config=config, state_dict=lambda: state)
    stored = dict(gguf_twins.tensors(decoder, architecture))
    keys = dict(gguf_twins.metadata(config, architecture))
    if family == "gemma3":  # files have no scale of queries but that of their width
        keys["attention.sliding_window_pattern"] = [True, False]
        for name in stored:
            if name.endswith("attn_q_norm.weight"):
                scale = (config.head_dim / config.query_pre_attn_scalar) ** 0.5
                stored[name] = stored[name] * np.float32(scale)
    if family == "qwen2_5_vl":
        keys["rope.dimension_sections"] = [*config.rope_parameters["mrope_section"], 0]
    metadata = {f"{architecture}.{key}": value for key, value in keys.items()}
    return write(path, architecture, metadata | tokenizer(folder, family), stored)


def decoder_name(name: str) -> str:
    """Return the name of a tensor of a decoder that stands alone."""
    for part in ("language_model.", "text_model."):
        name = name.replace(part, "")
    return name


def tokenizer(folder: Path, family: str) -> dict[str, Any]:
    """Return a folder's tokenizer as metadata."""
    spec = msgspec.json.decode((folder / "tokenizer.json").read_bytes())
    special = {token["content"]: token["id"] for token in spec["added_tokens"]}
    ids = spec["model"]["vocab"] | special
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": sorted(ids, key=lambda token: int(ids[token])),
        "token_type": [CONTROL if id in special.values() else 1 for id in sorted(ids.values())],
        "merges": [],
        "bos_token_id": 256,
        "eos_token_id": 257,
        "add_bos_token": family in BEGUN,
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    return metadata | {"tokenizer.chat_template": TEMPLATES[family]}


def write_mmproj(
    path: Path,
    folder: Path,
    family: str,
    *,
    kind: Quantization = Quantization.F32,
    keys: Mapping[str, Any] = types.MappingProxyType({}),
    tensors: Mapping[str, Floats | None] = types.MappingProxyType({}),
) -> Path:
    """Write the projector file of a folder.

    Args:
        kind: the type of matrices.
        keys: replace the file's own; None leaves one out.
        tensors: likewise.
    """
    metadata = {**mmproj_keys(folder, family), **keys}
    stored = {**dict(mmproj_tensors(folder, family)), **tensors}
    return write(
        path,
        "clip",
        {key: value for key, value in metadata.items() if value is not None},
        {name: numbers for name, numbers in stored.items() if numbers is not None},
        kind,
    )


def mmproj_keys(folder: Path, family: str) -> dict[str, Any]:
    """Return the metadata of a projector file."""
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    tower, text = config["vision_config"], config["text_config"]
    images = msgspec.json.decode((folder / "preprocessor_config.json").read_bytes())
    keys = {
        "image_size": tower.get("image_size"),
        "patch_size": tower["patch_size"],
        "embedding_length": tower["hidden_size"],
        "feed_forward_length": tower["intermediate_size"],
        "block_count": tower.get("num_hidden_layers", tower.get("depth")),
        "attention.head_count": tower.get("num_attention_heads", tower.get("num_heads")),
        "attention.layer_norm_epsilon": tower.get("layer_norm_eps", 1e-6),
        "projection_dim": text["hidden_size"],
        "image_mean": images["image_mean"],
        "image_std": images["image_std"],
    }
    if family in ("smolvlm", "idefics3"):
        keys["projector.scale_factor"] = config["scale_factor"]
        keys["preproc_image_size"] = images["size"]["longest_edge"]
    if family == "gemma3":
        side = tower["image_size"] // tower["patch_size"]
        keys["projector.scale_factor"] = side // int(config["mm_tokens_per_image"] ** 0.5)
    if family == "qwen2_5_vl":
        keys["image_size"] = 560
        keys["n_wa_pattern"] = tower["fullatt_block_indexes"][0] + 1
        # Files leave these out: those of published models are known.
        keys["window_size"] = tower["window_size"]
        keys["image_min_pixels"] = images["size"]["shortest_edge"]
        keys["image_max_pixels"] = images["size"]["longest_edge"]
    if family == "llava":
        keys["block_count"] += config["vision_feature_layer"] + 1
        keys["feature_layer"] = [keys["block_count"]]
        keys["projection_dim"] = tower["projection_dim"]
    return {
        "clip.has_vision_encoder": True,
        "clip.projector_type": PROJECTORS[family],
        f"clip.use_{'silu' if family == 'qwen2_5_vl' else 'gelu'}": family != "llava",
        **{f"clip.vision.{key}": value for key, value in keys.items()},
    }


def mmproj_tensors(folder: Path, family: str) -> Iterator[tuple[str, Floats]]:
    """Yield the tensors of a projector file."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
    if family == "llava":
        yield from older_tensors(folder)
        return
    for name, numbers in split(folder):
        if "patch_embed.proj.weight" in name:
            yield "v.patch_embd.weight", numbers[:, :, 0]
            yield "v.patch_embd.weight.1", numbers[:, :, 1]
            continue
        if "soft_emb_norm" in name:
            numbers = numbers + 1
        found = names.get_name(name.replace("_weight", ".weight"), (".weight", ".bias"))
        assert found is not None, name
        yield found, numbers


def older_tensors(folder: Path) -> Iterator[tuple[str, Floats]]:
    """Yield the tensors of LLaVA's file, by the script that is older than the converter.

    Its `ffn_up` and `ffn_down` have each other's names, and it leaves out what LLaVA does not use.
    """
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    num_layers = config["vision_config"]["num_hidden_layers"] + config["vision_feature_layer"] + 1
    unused = ("post_layernorm", *(f"layers.{i}." for i in range(num_layers, 64)))
    for name, numbers in tower_state(folder):
        if any(part in name for part in unused):
            continue
        for theirs, ours in OLDER.items():
            name = name.replace(theirs, ours)
        yield name, numbers


def split(folder: Path) -> Iterator[tuple[str, Floats]]:
    """Yield the weights of a folder's tower, joined ones in parts."""
    for name, numbers in tower_state(folder):
        if ".qkv." in name:
            for part, own in zip("qkv", np.split(numbers, 3), strict=True):
                yield name.replace("qkv", part), own
        else:
            yield name, numbers


def tower_state(folder: Path) -> Iterable[tuple[str, Floats]]:
    """Yield the weights of a folder's tower and projector."""
    for name, tensor in safetensors.torch.load_file(folder / "model.safetensors").items():
        if any(part in name for part in TOWERS) and "language_model." not in name:
            yield published(name), tensor.to(torch.float32).numpy()


def published(name: str) -> str:
    """Return the name that a tensor has in published folders; transformers has shortened some."""
    for prefix in ("vision_tower.", "model.vision_tower."):
        if name.startswith(prefix):
            rest = name.removeprefix(prefix).removeprefix("vision_model.")
            return f"vision_tower.vision_model.{rest}"
    return name.removeprefix("model.") if name.startswith("model.visual.") else name


def write(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Floats],
    kind: Quantization = Quantization.F32,
) -> Path:
    """Write a GGUF file.

    Args:
        kind: of matrices whose rows are whole blocks of it; all others are F32.
    """
    table, data = [], b""
    for name, numbers in tensors.items():
        block = gguf.GGML_QUANT_SIZES[kind][0]
        own = kind if numbers.ndim == 2 and numbers.shape[-1] % block == 0 else Quantization.F32
        table.append((name, int(own), numbers.shape, len(data)))
        data += gguf.quantize(np.ascontiguousarray(numbers, np.float32), own).tobytes()
        data += bytes(-len(data) % ALIGNMENT)
    head = {"general.architecture": architecture, **metadata}
    path.write_bytes(serialized(head, table, data))
    return path
