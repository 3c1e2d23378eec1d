"""Transformers' modules on a GPU: which models run there, and that a step has all of its tensors
there. No GPU is needed: torch's meta device takes its place, where tensors have no numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_configs import execution_config
from gemma_models import tiny_gemma
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.engine_proc.worker import backend_selection, device_selection
from headrace.engine_proc.worker.backend_selection import TRANSFORMERS, foresee
from headrace.engine_proc.worker.device_selection import find_gpus
from headrace.engine_proc.worker.execution.executor import Batch
from headrace.engine_proc.worker.hf import executor as executor_module
from headrace.engine_proc.worker.hf.executor import TransformersExecutor
from headrace.engine_proc.worker.hf.model import TransformersModel, on_device
from headrace.engine_proc.worker.model_opener import open_for
from headrace.errors import ModelError

ELSEWHERE = "meta"
COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
# A window; learned positions; squared ReLU in MLPs without gates.
FAMILIES: dict[str, dict[str, Any]] = {
    "starcoder2": {"sliding_window": 5},
    "gpt2": {"n_positions": 64},
    "nemotron": {},
}
STEP = Batch(
    token_ids=np.arange(8, dtype=np.int32),
    positions=np.array([4, 5, 6, 7, 4, 5, 8, 9], np.int32),
    sequences=np.array([0, 0, 0, 0, 1, 1, 2, 2], np.int32),
    page_table=np.arange(9, dtype=np.int32).reshape(3, 3),
    logit_rows=np.array([3, 5, 7], np.int32),
)


def save(folder: Path, model_type: str) -> Any:
    """Save a random model of a family, and return it."""
    config = transformers.AutoConfig.for_model(model_type, **TINY | FAMILIES[model_type])
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return model


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of two devices, copies and numbers aside."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        devices = {tensor.device for tensor in tensors if tensor.dim() > 0}
        assert len(devices) <= 1 or func in COPIES, func
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_step_has_all_of_its_tensors_on_the_models_device(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, model_type)
    model = open_for(execution_config(tmp_path, model_impl="transformers", max_model_len=64))
    assert isinstance(model, TransformersModel)
    on_device(model.module, ELSEWHERE)
    monkeypatch.setattr(executor_module, "to_floats", lambda tensor: tensor)
    executor = TransformersExecutor(model, num_pages=1, page_tokens=4)
    executor.take_pages(9)
    with OneDevice():
        logits: Any = executor.forward(STEP)
    assert (logits.device.type, logits.shape) == (ELSEWHERE, (3, 96))


def test_float16_is_kept_but_on_processors(tmp_path: Path) -> None:
    module = save(tmp_path, "gpt2").to(torch.float16)
    assert on_device(module, ELSEWHERE).dtype == torch.float16
    assert on_device(save(tmp_path, "gpt2").to(torch.float16), "cpu").dtype == torch.float32


def test_decoders_without_a_kernel_run_in_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_gemma("gemma4_text").save_pretrained(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert find_gpus("cuda", 1) == ""
    for module in (device_selection, backend_selection):
        monkeypatch.setattr(module, "lacking_kernel", lambda spec: "a new kind of layer")
    told = foresee(execution_config(tmp_path, device="cuda"))
    why = "no kernel of GPUs has a new kind of layer; on GPUs: --device says so"
    assert told == (TRANSFORMERS, why, True)
    assert foresee(execution_config(tmp_path)).executor == "the C++ core"
    why = "has a new kind of layer, which GPU workers cannot run"
    with pytest.raises(ModelError, match=why):
        foresee(execution_config(tmp_path, device="cuda", model_impl="headrace"))
