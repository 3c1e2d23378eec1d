"""A model that takes images, as far as the processes around an engine read it."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from headrace.model.tokenizer_json import read_tokenizer_json
from support.models import demo_model

SPECIAL = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text or '<start_of_image>' }}{% endfor %}{% endif %}"
    "{% endfor %}"
)
PROCESSOR = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 896, "width": 896},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


@cache
def vision_folder() -> Path:
    """Return a folder with Gemma 3's image processor and the demo model's tokenizer; no weights."""
    folder = Path(mkdtemp(prefix="headrace-bench-")) / "gemma3"
    folder.mkdir()
    tokenizer = json.loads(read_tokenizer_json(demo_model()))
    first = 1 + max(tokenizer["model"]["vocab"].values())
    flags = {"special": True, "normalized": False, "single_word": False}
    flags |= {"lstrip": False, "rstrip": False}
    tokenizer["added_tokens"] += [
        {"id": first + i, "content": token} | flags for i, token in enumerate(SPECIAL)
    ]
    config = {
        "model_type": "gemma3",
        "text_config": {"vocab_size": first + len(SPECIAL), "max_position_embeddings": 32768},
        "vision_config": {"image_size": 896, "patch_size": 14},
        "image_token_index": first,
        "boi_token_index": first + 1,
        "eoi_token_index": first + 2,
        "mm_tokens_per_image": 256,
        "eos_token_id": 2,
    }
    files = {
        "config": config,
        "tokenizer": tokenizer,
        "tokenizer_config": {"chat_template": TEMPLATE},
        "preprocessor_config": PROCESSOR,
    }
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder
