"""A model that costs next to nothing: a random Llama of one layer.

It has the demo model's tokenizer. What is measured with it is everything else. Made once, in the
cache folder.
"""

import shutil
from pathlib import Path

import msgspec

from headrace.model_card import read_gguf
from headrace.tokenizer_json import read_tokenizer_json
from support.models import CACHE, demo_model

MAX_POSITIONS = 131072


def tiny_folder() -> Path:
    """Return the Hugging Face folder of the model."""
    folder = CACHE / "tiny"
    if not folder.exists():
        unfinished = CACHE / "tiny.unfinished"
        write_tiny(demo_model(), unfinished)
        unfinished.rename(folder)
    return folder


def tiny_embedder() -> Path:
    """Return the folder of the same as an embedding model that pools by the last token."""
    folder = CACHE / "tiny-embedder"
    if not folder.exists():
        unfinished = CACHE / "tiny-embedder.unfinished"
        shutil.copytree(tiny_folder(), unfinished, dirs_exist_ok=True)
        modules = [
            {"path": "", "type": "sentence_transformers.models.Transformer"},
            {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        ]
        (unfinished / "modules.json").write_bytes(msgspec.json.encode(modules))
        (unfinished / "1_Pooling").mkdir(exist_ok=True)
        pooling = {"pooling_mode_lasttoken": True}
        (unfinished / "1_Pooling" / "config.json").write_bytes(msgspec.json.encode(pooling))
        unfinished.rename(folder)
    return folder


def write_tiny(source: Path, folder: Path) -> None:
    """Write the model, with the tokenizer and the chat template of a .gguf file."""
    import torch
    import transformers

    card = read_gguf(source)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=card.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_POSITIONS,
        eos_token_id=card.eos_token_ids[0],
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(read_tokenizer_json(source))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": card.chat_template,
        **card.special_tokens,
    }
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))
