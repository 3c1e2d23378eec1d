"""Small random models on disk."""

from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace.config.model_card import find_demo_model
from headrace.model.tokenizer_json import read_tokenizer_json


def make_folder(folder: Path, model_type: str, **fields: Any) -> Any:
    """Save a small random model in bf16, with the demo model's tokenizer; return it in fp32.

    `fields` are of its configuration, beside those that all have.
    """
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 49152,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": 2,
    }
    config = transformers.AutoConfig.for_model(model_type, **{**sizes, **fields})
    return save_in_bf16(transformers.AutoModelForCausalLM.from_config(config), folder)


def save_in_bf16(model: Any, folder: Path) -> Any:
    """Save a model of the demo model's vocabulary, with its tokenizer; return it in fp32.

    It is read again: in bf16 its RoPE is rounded, too.
    """
    demo = find_demo_model()
    assert demo is not None, "install the demo model: make install"
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(read_tokenizer_json(demo))
    write_template(folder)
    return type(model).from_pretrained(folder, dtype=torch.float32)


def make_byte_folder(folder: Path, model_type: str = "llama", **fields: Any) -> None:
    """Save a model of one layer and 257 tokens, which are bytes: small enough to be interpreted.

    `fields` are of its configuration, beside those that all have.
    """
    torch.manual_seed(0)
    tokens = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens[:1])
    sizes = {
        "vocab_size": len(tokens),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "eos_token_id": 0,
        "bos_token_id": 0,
        "initializer_range": 0.3,
    }
    config = transformers.AutoConfig.for_model(model_type, **{**sizes, **fields})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_template(folder)


def write_template(folder: Path) -> None:
    """Write a chat template beside a model."""
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    settings = {"chat_template": template}
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))
