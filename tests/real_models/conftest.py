"""The files of `make real-models`, and what transformers makes of them, one after the other."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from demo_in_transformers import files_read_at_once

from support.real_models import REAL_MODELS, fetch


@pytest.fixture(scope="session", params=REAL_MODELS)
def real_file(request: pytest.FixtureRequest) -> Path:
    """A file, fetched with its progress shown; without `make real-models`, a skip."""
    if "REAL_MODELS" not in os.environ:
        pytest.skip("make real-models")
    manager: Any = request.config.pluginmanager.getplugin("capturemanager")
    with manager.global_and_fixture_disabled():
        return fetch(request.param)


@pytest.fixture(scope="session")
def reference_tokenizer(real_file: Path) -> Any:
    """The file's tokenizer as transformers reads it."""
    with files_read_at_once():
        return transformers.AutoTokenizer.from_pretrained(
            str(real_file.parent), gguf_file=real_file.name
        )


@pytest.fixture(scope="session")
def reference_model(real_file: Path) -> Any:
    """The file's model as transformers reads it: dequantized to fp32."""
    with files_read_at_once():
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(real_file.parent), gguf_file=real_file.name, dtype=torch.float32
        )
    return model.eval()
