"""A draft model that does not fit beside its model is refused before any weights are read."""

from pathlib import Path
from typing import Any

import pytest
from engine_configs import execution_config
from foreseeing_models import save_foreseeing

from headrace.engine_proc.worker.draft_opener import bytes_beside, draft_bytes, open_draft
from headrace.engine_proc.worker.execution.held_matrices import WeightDtype
from headrace.engine_proc.worker.execution.memory_check import (
    check_weights,
    core_bytes,
    step_bytes,
)
from headrace.engine_proc.worker.models.model import open_model
from headrace.errors import ConfigError

PLENTY = 1 << 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    save_foreseeing(root / "model", root / "eagle")
    return root


@pytest.mark.parametrize("method", ["draft_model", "self", "eagle3"])
def test_draft_that_does_not_fit_is_refused(folder: Path, method: str) -> None:
    path = {"draft_model": folder / "model", "eagle3": folder / "eagle"}.get(method)
    own: dict[str, Any] = {"speculative": method, "draft_model": path and str(path)}
    config = execution_config(folder / "model", kv_cache_memory_bytes=1 << 20, **own)
    model, dtype = open_model(folder / "model"), WeightDtype.PACKED
    draft = open_draft(config, model, dtype, PLENTY)
    assert draft is not None
    taken = core_bytes(model.spec, model.weights, dtype, True) + draft_bytes(draft, config)
    needed = taken + bytes_beside(config, model, draft.model.spec)
    assert open_draft(config, model, dtype, needed) is not None
    with pytest.raises(ConfigError, match=r"draft model's weights take .* use a smaller one"):
        open_draft(config, model, dtype, needed - 1)


def test_layer_of_the_model_counts_among_its_weights(folder: Path) -> None:
    config = execution_config(folder / "model", speculative="mtp")
    alone = open_model(folder / "model")
    whole = open_model(folder / "model", drafts=True)
    memory = core_bytes(alone.spec, alone.weights, WeightDtype.PACKED, True)
    memory += step_bytes(alone.spec, config.max_num_batched_tokens)
    check_weights(config, [alone], WeightDtype.PACKED, memory)
    with pytest.raises(ConfigError, match="its weights take"):
        check_weights(config, [whole], WeightDtype.PACKED, memory)


def test_layer_of_eagle_counts_once_for_each_worker(folder: Path) -> None:
    own: dict[str, Any] = {"speculative": "eagle3", "draft_model": str(folder / "eagle")}
    model = open_model(folder / "model")
    taken = []
    for tp in (1, 2):
        config = execution_config(folder / "model", tp=tp, **own)
        draft = open_draft(config, model, WeightDtype.PACKED, PLENTY)
        assert draft is not None
        beside = bytes_beside(config, model, draft.model.spec)
        taken.append(beside - step_bytes(model.spec, config.max_num_batched_tokens))
    assert taken[1] == 2 * taken[0] > 0
