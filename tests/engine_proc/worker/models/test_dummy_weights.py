"""A config alone is a model: its weights are random, and shares of them parts of the whole."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from engine_configs import execution_config
from random_decoders import HYBRIDS, NUM_PAGES, SPECS, batch, cpu
from tiny_vision import make_vision_folder

from headrace.engine_proc.worker.backend_selection import foresee
from headrace.engine_proc.worker.checkpoints.weights import Format
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor
from headrace.engine_proc.worker.model_opener import open_for
from headrace.engine_proc.worker.models.dummy_weights import dummy_weights
from headrace.engine_proc.worker.models.model import DecoderModel, open_model
from headrace.engine_proc.worker.models.specs.decoder_spec import Norm
from headrace.engine_proc.worker.models.weight_shapes import weight_shapes
from headrace.engine_proc.worker.parallel.shard import shard_weights, shards
from headrace.errors import ConfigError, ModelError

CONFIG = {
    "model_type": "llama",
    "vocab_size": 110,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 7,
}


def folder_of(path: Path, **differences: object) -> Path:
    (path / "config.json").write_text(json.dumps(CONFIG | differences))
    return path


def test_a_config_is_enough_to_compute_logits(tmp_path: Path) -> None:
    model = open_model(folder_of(tmp_path), "dummy")
    assert model.eos_ids == (7,)
    executor = CpuExecutor(model.spec, model.weights, num_pages=NUM_PAGES, page_tokens=16)
    logits = executor.forward(batch([(0, 0, 9)]))
    assert logits.shape == (9, 110)
    assert np.isfinite(logits).all()
    assert logits.std(axis=1).min() > 0.01
    again = cpu(model.spec, open_model(tmp_path, "dummy").weights)
    np.testing.assert_array_equal(again.forward(batch([(0, 0, 9)])), logits)


def test_states_of_dummy_weights_do_not_grow() -> None:
    weights = dummy_weights(HYBRIDS["qwen3_next"])
    assert HYBRIDS["qwen3_next"].norm == Norm.RMS_ONE_PLUS
    assert set(weights["layers.0.delta.rate"].to_float32()) == {-1}
    assert set(weights["layers.0.delta.gated_norm"].to_float32()) == {1}
    assert set(weights["layers.0.attn_norm"].to_float32()) == {0}


@pytest.mark.parametrize("name", ["gemma", "olmo", "biases, odd sizes"])
def test_shares_are_parts_of_the_whole(name: str) -> None:
    spec = SPECS[name]
    weights = dummy_weights(spec)
    rows, columns = {"q": 0, "gate": 0, "embed": 0}, {"o": 1, "down": 1}
    own = [shard_weights(spec, weights, shard) for shard in shards(spec, weights, 2)]
    for name, shape in weight_shapes(spec).items():
        whole = weights[name].to_float32()
        assert whole.shape == shape
        local = name.rpartition(".")[-1]
        if local in rows | columns:
            parts = [share[name].to_float32() for share in own]
            np.testing.assert_array_equal(np.concatenate(parts, (rows | columns)[local]), whole)


def test_numbers_are_small_and_differ_from_weight_to_weight() -> None:
    weights = dummy_weights(SPECS["llama"])
    q, o = (weights[f"layers.0.{name}"].to_float32() for name in "qo")
    assert not np.array_equal(q, o)
    assert abs(q.mean()) < 1e-3
    assert 0.015 < q.std() < 0.02
    assert np.abs(np.corrcoef(q)[0, 1:]).max() < 0.5
    assert weights["layers.0.q"].stored().format == Format.BF16
    np.testing.assert_array_equal(weights["norm"].to_float32(), 1)
    np.testing.assert_array_equal(dummy_weights(SPECS["gemma"])["norm"].to_float32(), 0)


def test_what_has_no_dummy_is_refused(tmp_path: Path) -> None:
    folder_of(tmp_path)
    with pytest.raises(ModelError, match="--load-format dummy takes a folder"):
        open_model("model.gguf", "dummy")
    ours = execution_config(tmp_path, load_format="dummy")
    assert isinstance(open_for(ours), DecoderModel)
    assert foresee(ours).why
    with pytest.raises(ConfigError, match="--quantization fp8 is for GPUs"):
        foresee(dataclasses.replace(ours, quantization="fp8"))
    make_vision_folder(tmp_path, "smolvlm")
    with pytest.raises(ModelError, match=r"--load-format dummy takes no .* images"):
        open_for(ours)
    scores = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "relevant"}}
    folder_of(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | scores))
    for refuse in (open_for, foresee):
        with pytest.raises(ModelError, match="--load-format dummy takes no cross-encoders"):
            refuse(ours)
