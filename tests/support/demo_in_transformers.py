"""The demo model as `transformers` has it, loaded once for all tests: that takes seconds."""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import numpy.typing as npt
import torch
import transformers

from headrace.config.model_card import find_demo_model

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}
Floats = npt.NDArray[np.float32]


def demo_file() -> Path:
    """Return the model's file."""
    path = find_demo_model()
    assert path is not None, "install the demo model: make install"
    return path


@contextlib.contextmanager
def files_read_at_once() -> Iterator[None]:
    """Their reader makes a million views of a mapped file; of one in memory they take a third."""
    with mock.patch.object(np, "memmap", lambda path, **_: np.fromfile(path, np.uint8)):
        yield


@functools.cache
def demo_tokenizer() -> Any:
    """Return what code of their own makes of the tokenizer in the file."""
    path = demo_file()
    with files_read_at_once():
        return transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def permuted(rows: Floats, num_heads: int, *, back: bool = False) -> Floats:
    """Bring the rows of each head from halves to pairs, as converters of Llama do, or `back`."""
    halves = rows.reshape(num_heads, *((-1, 2) if back else (2, -1)), *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


@functools.cache
def demo_model() -> Any:
    """Return a `LlamaForCausalLM` with what the `gguf` package decodes, in fp32."""
    with files_read_at_once():
        reader = gguf.GGUFReader(demo_file())

    def value(key: str) -> Any:
        field = reader.get_field(f"llama.{key}")
        assert field is not None
        return field.contents()

    config = transformers.LlamaConfig(
        vocab_size=value("vocab_size"),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=value("context_length"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    names = {ggufs: theirs for theirs, ggufs in GGUF_NAMES.items()}
    state = {}
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        if "attn_q." in tensor.name or "attn_k." in tensor.name:
            numbers = permuted(numbers, len(numbers) // 64, back=True)
        name = ".".join(names.get(part, part) for part in tensor.name.split("."))
        state[name] = torch.from_numpy(np.array(numbers, np.float32))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are not stored
    return model.eval()


def says(model: Any, prompt: list[int], answer: list[int]) -> bool:
    """Whether a model answers so greedily, in one pass: every token is the likeliest after those
    before it.
    """
    ids = torch.tensor([prompt + answer[:-1]])
    with torch.inference_mode():
        likeliest = model(ids).logits[0, len(prompt) - 1 :].argmax(dim=-1)
    return bool(likeliest.tolist() == answer)
