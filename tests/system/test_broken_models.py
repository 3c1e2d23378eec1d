"""A model that cannot be served ends the start with one line that names file and tensor.

A server says what reading the model says: here the supervisor's part and a worker's are called, and
one model of each kind is launched.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
import transformers
from engine_configs import execution_config
from gguf_files import serialized, write_decoder
from safetensors.torch import load_file, save_file
from servers import PATIENCE_S

from headrace.config.config import ServerConfig
from headrace.config.model_card import find_demo_model, read_card
from headrace.engine_proc.worker.model_opener import open_for
from headrace.errors import ModelError
from headrace.exit_status import ExitStatus
from headrace.model.gguf import read_metadata
from headrace.model.tokenizer_json import read_tokenizer_json

NORM = "model.norm.weight"
EXPERTS = {"llama.expert_count": 4, "llama.expert_used_count": 2}


def make_folder(folder: Path) -> Path:
    """Save a small Llama with the demo model's tokenizer, and return its weights' file."""
    demo = find_demo_model()
    assert demo is not None, "install the demo model: make install"
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(read_tokenizer_json(demo))
    return folder / "model.safetensors"


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def take_out(path: Path) -> None:
    tensors = load_file(path)
    del tensors[NORM]
    save_file(tensors, path, {"format": "pt"})


def reshape(path: Path) -> None:
    tensors = load_file(path)
    tensors[NORM] = tensors[NORM][:-1].clone()
    save_file(tensors, path, {"format": "pt"})


def rename_architecture(path: Path) -> None:
    config = path.parent / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"aardvark"'))


MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}


def claim(**fields: int) -> Callable[[Path], None]:
    """Return what writes a config of a mixture over that of the folder."""

    def harm(path: Path) -> None:
        config = path.parent / "config.json"
        said = msgspec.json.decode(config.read_bytes())
        mixture = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
        config.write_bytes(msgspec.json.encode(said | mixture | MIXTURE | fields))

    return harm


def misshape_experts(path: Path) -> None:
    claim()(path)
    tensors = load_file(path)
    moe = "model.layers.0.block_sparse_moe"
    tensors[f"{moe}.gate.weight"] = torch.zeros(4, 16)
    for expert in range(4):
        for name in ("w1", "w2", "w3"):
            tensors[f"{moe}.experts.{expert}.{name}.weight"] = torch.zeros(16, 16 + expert // 3)
    for name in [name for name in tensors if ".mlp." in name]:
        del tensors[name]
    save_file(tensors, path, {"format": "pt"})


def refusal_of(model: Path, impl: str = "auto") -> str:
    """Return the one line why a model is not served, by what supervisor and worker read of it."""
    with pytest.raises(ModelError) as refused:
        read_card(ServerConfig(model=str(model)))
        open_for(execution_config(model, model_impl=impl))
    (line,) = str(refused.value).splitlines()
    return line


def launch(model: Path, impl: str = "auto") -> list[str]:
    """Launch a server; return what it says, the last line being why it ends."""
    program = str(Path(sys.executable).parent / "launch_server")
    command = [program, "--port", "0", "--model-impl", impl, str(model)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == ExitStatus.BAD_MODEL, ended.stderr
    lines = ended.stderr.splitlines()
    assert lines[-1].startswith("launch_server: error: ")
    return lines


# Where the core refuses a config, "auto" asks transformers, which takes seconds to load.
@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (take_out, "tiny: tensor 'model.norm.weight' is missing"),
        (
            reshape,
            "tensor 'model.norm.weight' has shape [15], but a llama model of this config has [16]",
        ),
        (claim(num_local_experts=1 << 40), "'num_local_experts': 1099511627776, not at most 4096"),
        (claim(num_experts_per_tok=5), "'num_experts_per_tok': 5, not at most the number of"),
        (claim(), "tensor 'model.layers.0.mlp.gate.weight' is missing"),
        (misshape_experts, "experts.3.w1.weight' has shape [16, 17], but a mixtral model"),
    ],
)
def test_a_broken_folder_is_named(harm: Callable[[Path], None], says: str, tmp_path: Path) -> None:
    harm(make_folder(tmp_path / "tiny"))
    line = refusal_of(tmp_path / "tiny", "auto" if harm in (take_out, reshape) else "headrace")
    assert says in line
    assert str(tmp_path) in line


@pytest.mark.parametrize(
    ("harm", "impl", "says"),
    [
        (take_out, "auto", "tiny: tensor 'model.norm.weight' is missing"),
        (cut_short, "headrace", "model.safetensors: truncated: tensor 'model.norm.weight' ends"),
        (rename_architecture, "auto", "aardvark"),
    ],
)
def test_a_server_of_a_broken_folder_ends_with_its_name(
    harm: Callable[[Path], None], impl: str, says: str, tmp_path: Path
) -> None:
    harm(make_folder(tmp_path / "tiny"))
    (line,) = launch(tmp_path / "tiny", impl)
    assert says in line
    assert str(tmp_path) in line


def test_half_a_gguf_file_is_named_and_the_server_ends_for_it(tmp_path: Path) -> None:
    demo = find_demo_model()
    assert demo is not None, "install the demo model: make install"
    with demo.open("rb") as file:
        (tmp_path / "half.gguf").write_bytes(file.read(8 << 20))
    (line,) = launch(tmp_path / "half.gguf")
    assert "half.gguf: truncated: tensor '" in line


def test_a_missing_part_of_a_split_gguf_file_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", split_max_tensors=1)
    for name in ("a", "b"):
        writer.add_tensor(name, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "big-00002-of-00002.gguf").unlink()
    line = refusal_of(tmp_path / "big-00001-of-00002.gguf")
    assert "1 of the 2 parts are missing beside it: big-00002-of-00002.gguf" in line


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"general.architecture": "clip"}, "model.gguf: an mmproj file with projector ''"),
        ({"llama.context_length": 1 << 40}, "llama.context_length is 1099511627776"),
        ({"llama.attention.head_count": 1}, "tensor 'blk.0.attn_k.weight' has shape [16, 32]"),
        ({"split.count": 2}, "model.gguf: one part of a split file"),
        (EXPERTS | {"llama.expert_count": 1 << 31}, "'expert_count': 2147483648, not at most 4096"),
        (EXPERTS | {"llama.expert_used_count": 5}, "'expert_used_count': 5, not at most the"),
    ],
)
def test_a_gguf_that_contradicts_itself_is_named(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    assert says in refusal_of(write_changed(tmp_path, changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer.ggml.pre": "aardvark"}, "aardvark"),
        ({"tokenizer.ggml.merges": ["x y"]}, "model.gguf: its tokenizer cannot be loaded"),
        ({"general.architecture": "mamba"}, "mamba"),
        (EXPERTS, "tensor 'blk.0.ffn_gate_inp.weight' is missing"),
    ],
)
def test_a_gguf_that_processes_refuse_ends_the_server(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """Tokenizers the first two, a worker the last; the supervisor refuses half a file."""
    *before, line = launch(write_changed(tmp_path, changes))
    assert says in line
    assert not any("Traceback" in each for each in before)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (9, "tensor 'token_embd.weight' is stored as Q8_1"),
        (99, "tensor 'token_embd.weight' is stored as"),
    ],
)
def test_a_gguf_of_an_unread_type_is_named(kind: int, says: str, tmp_path: Path) -> None:
    assert says in refusal_of(write_changed(tmp_path, {}, {"token_embd.weight": kind}))


def test_swapped_parts_of_a_gguf_are_named(tmp_path: Path) -> None:
    write_decoder(tmp_path / "big.gguf", split_max_tensors=8)
    first, second, *_ = sorted(tmp_path.glob("big-*.gguf"))
    aside = first.rename(tmp_path / "aside")
    second.rename(first)
    aside.rename(second)
    line = refusal_of(first)
    assert first.name in line


def write_changed(
    folder: Path, changes: dict[str, Any], kinds: Mapping[str, int] = MappingProxyType({})
) -> Path:
    """Write a small model with other metadata and types of tensors."""
    write_decoder(folder / "right.gguf")
    right = read_metadata(folder / "right.gguf")
    start = min(tensor.offset for tensor in right.tensors)
    table = [(t.name, kinds.get(t.name, t.type), t.shape, t.offset - start) for t in right.tensors]
    weights = (folder / "right.gguf").read_bytes()[start:]
    path = folder / "model.gguf"
    path.write_bytes(serialized(right.metadata | changes, table, weights))
    return path
