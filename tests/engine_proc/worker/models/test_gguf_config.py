"""Each architecture of GGUF files executes as its family does in transformers."""

from pathlib import Path
from typing import Any

import gguf_gemmas
import gguf_twins
import numpy as np
import pytest
from gguf_twins import tiny_model, write_gguf
from mixture_models import PROMPT, all_ways, batch, reference

from headrace.engine_proc.worker.checkpoints.gguf_tensors import open_tensors, xielu_tensors
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor
from headrace.engine_proc.worker.models.gguf_architectures import ARCHITECTURES
from headrace.engine_proc.worker.models.gguf_config import periods
from headrace.engine_proc.worker.models.model import open_model
from headrace.engine_proc.worker.models.specs.config_fields import ConfigFields
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.errors import ModelError
from headrace.model.gguf import read_metadata

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
# Of test_hybrid_families.py.
HYBRIDS = {"lfm2", "qwen35", "granitehybrid", "nemotron_h", "falcon-h1"}
LATENT = {"deepseek2"}  # of test_latent_families.py
UNSCALED = {"rope_type": "default", "rope_theta": 20000.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [2.0] * 6,
    "original_max_position_embeddings": 64,
}
MINISTRAL = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
GRANITE = {
    "head_dim": None,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 5, "rms_norm_eps": 1e-3}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama with linear rope": {"rope_parameters": LINEAR},
    "llama with yarn rope": {"rope_parameters": YARN},
    "mistral": {"sliding_window": None, "head_dim": 32},
    "ministral3": {"rope_parameters": MINISTRAL | {"original_max_position_embeddings": 8}},
    "ministral3 without temperatures": {"rope_parameters": MINISTRAL | {"llama_4_scaling_beta": 0}},
    "qwen2": {"rope_parameters": YARN},
    "qwen3": {"head_dim": 32},
    "gemma": {"head_dim": 32, "rms_norm_eps": 1e-3},
    "gemma2": GEMMA
    | {"num_hidden_layers": 3, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    "gemma3_text": GEMMA | {"num_hidden_layers": 7},
    "gemma3_text with linear rope": GEMMA
    | {
        "num_hidden_layers": 7,
        "rope_parameters": {"full_attention": LINEAR, "sliding_attention": UNSCALED},
    },
    "phi3": {"head_dim": None, "sliding_window": 5},
    "phi3 with longrope": {
        "head_dim": None,
        "original_max_position_embeddings": 64,
        "rope_parameters": LONG,
    },
    "granite": GRANITE,
    "granite_swa": GRANITE | {"sliding_window": 5, "num_hidden_layers": 5},
    "olmo2": {"head_dim": None},
    "olmo3": {
        "head_dim": None,
        "sliding_window": 5,
        "num_hidden_layers": 5,
        "rope_parameters": {"full_attention": YARN, "sliding_attention": UNSCALED},
    },
    "smollm3": {"head_dim": None, "num_hidden_layers": 5},
    "glm4": {"attention_bias": True},
    "ernie4_5": {"head_dim": 32},
    "ernie4_5 with biases": {"use_bias": True},
    "exaone4": {"head_dim": None, "sliding_window": 5, "num_hidden_layers": 5},
    "exaone4 without windows": {
        "head_dim": None,
        "sliding_window": None,
        "sliding_window_pattern": 4,
        "layer_types": ["full_attention"] * 2,
    },
    "cohere": {"head_dim": None, "logit_scale": 1.5},
    "cohere2": {
        "head_dim": None,
        "logit_scale": 1.5,
        "sliding_window": 5,
        "num_hidden_layers": 5,
    },
    "starcoder2": {"head_dim": None},
    "nemotron": {"head_dim": 32, "initializer_range": 0.1},
    "apertus": {"head_dim": 32},  # whose RoPE is that of Llama 3
    "arcee": {"rope_parameters": YARN},
    "gpt_neox": {"head_dim": None, "num_key_value_heads": None},
    "gpt_neox one after the other": {
        "head_dim": None,
        "num_key_value_heads": None,
        "use_parallel_residual": False,
    },
    "phi": {"head_dim": None},
    "seed_oss": {"head_dim": 32},
    "hunyuan_v1_dense": {"head_dim": 32, "rope_parameters": UNSCALED},
    "stablelm": {"head_dim": None, "use_qkv_bias": True},
    "stablelm with one norm": {"head_dim": None, "use_parallel_residual": True},
}


YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}


def executor_of(path: Path) -> CpuExecutor:
    model = open_model(path)
    return CpuExecutor(model.spec, model.weights, num_pages=8, page_tokens=16, threads=1)


@pytest.mark.parametrize("case", CASES)
def test_an_architecture_executes_as_in_transformers(case: str, tmp_path: Path) -> None:
    model = tiny_model(case.split()[0], **CASES[case])
    expected = reference(model)
    assert np.abs(expected).max() > 1  # a model that says nothing agrees with anything
    ways = all_ways(executor_of(write_gguf(tmp_path / "tiny.gguf", model)))
    np.testing.assert_allclose(ways["alone"], expected, atol=3e-5, rtol=0)
    for way, logits in ways.items():
        np.testing.assert_array_equal(logits, ways["alone"], way)


def test_every_architecture_has_a_case() -> None:
    names = [case.split()[0] for case in CASES]
    tested = {gguf_twins.ARCHITECTURES.get(name, name) for name in names}
    tested |= set(gguf_gemmas.ARCHITECTURES.values())  # of test_gemma_families.py
    assert tested | {"qwen2vl"} | HYBRIDS | LATENT == set(ARCHITECTURES)


def test_text_of_qwen2vl_executes_as_qwen2(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    path = write_gguf(
        tmp_path / "tiny.gguf",
        model,
        architecture="qwen2vl",
        keys={"rope.dimension_sections": [2, 3, 3, 0]},
    )
    assert open_model(path).spec.ropes[0].axes == (0, 0, 1, 1, 1, 2, 2, 2)
    logits = executor_of(path).forward(batch([(PROMPT, 0, [3, 0])]))
    np.testing.assert_allclose(logits, reference(model), atol=3e-5, rtol=0)


def lowered(tmp_path: Path, model_type: str, keys: dict[str, Any], **fields: Any) -> DecoderSpec:
    """Return the spec of a tiny model's file with some keys changed."""
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(model_type, **fields), keys=keys)
    return open_model(path).spec


def test_fused_queries_keys_and_values_are_taken_apart(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    fused = write_gguf(tmp_path / "fused.gguf", model, fuse_qkv=True)
    step = batch([(PROMPT, 0, [3, 0])])
    np.testing.assert_allclose(executor_of(fused).forward(step), reference(model), atol=3e-5)


def test_numbers_of_xielu_that_are_none_are_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("apertus"))
    whole = path.read_bytes()
    key = b"xielu.beta"
    assert whole.count(key) == 1
    path.write_bytes(whole.replace(key, b"xielu.zeta"))
    with pytest.raises(ModelError, match=r"'blk.0.xielu.beta' is missing"):
        open_model(path)
    with pytest.raises(ModelError, match=r"xielu.beta is 0.5, not a list of numbers"):
        dict(xielu_tensors({"xielu.beta": 0.5}))


def test_keys_of_granite_4_change_nothing(tmp_path: Path) -> None:
    plain = lowered(tmp_path, "granite", {}, **GRANITE)
    hybrid = {
        "attention.head_count_kv": [2, 2],
        "expert_count": 0,
        "rope.scaling.finetuned": True,
        "ssm.conv_kernel": 4,
    }
    assert lowered(tmp_path, "granite", hybrid, **GRANITE) == plain


def test_positions_end_where_another_rule_begins(tmp_path: Path) -> None:
    long = CASES["phi3 with longrope"]
    assert lowered(tmp_path, "phi3", {}, **long).max_position == 64
    assert lowered(tmp_path, "qwen2", {}, **CASES["qwen2"]).max_position == 256


def test_the_largest_gemmas_scale_scores_by_width(tmp_path: Path) -> None:
    gemma = GEMMA | {"num_hidden_layers": 46, "intermediate_size": 8}
    assert lowered(tmp_path, "gemma2", {}, **gemma).attention_scale == 16**-0.5
    smaller = GEMMA | {"num_hidden_layers": 45, "intermediate_size": 8}
    assert lowered(tmp_path, "gemma2", {}, **smaller).attention_scale == 32**-0.5


@pytest.mark.parametrize(
    ("model_type", "windows"),
    [("gemma2", (4096, None)), ("gemma3_text", (None, None)), ("cohere2", (4096, 4096))],
)
def test_files_without_a_window_have_their_family_s(
    model_type: str, windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    spec = lowered(tmp_path, model_type, {"attention.sliding_window": None})
    assert tuple(layer.window for layer in spec.layers) == windows


def test_stacked_experts_are_read_expert_after_expert(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).standard_normal((4, 32, 64), np.float32)
    extra = {"blk.0.ffn_gate_exps.weight": numbers}
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), extra=extra)
    stacked = open_tensors(read_metadata(path))["blk.0.ffn_gate_exps.weight"]
    assert stacked.shape == (4, 32, 64)
    np.testing.assert_array_equal(stacked.rows(1, 3).to_float32(), numbers[1:3])


@pytest.mark.parametrize(
    ("model_type", "keys", "complaint"),
    [
        ("llama", {"attention.sliding_window": 5}, "'attention.sliding_window': 5"),
        ("llama", {"rope.dimension_count": 8}, "'rope.dimension_count': 8, not 16"),
        ("llama", {"rope.scaling.type": "dynamic"}, "'rope.scaling.type': 'dynamic'"),
        ("llama", {"rope.scaling.factor": 1e-40}, "'factor': 9.99994"),
        ("llama", YARN_KEYS | {"rope.scaling.yarn_beta_slow": 0.0}, "'beta_slow': 0.0, not a pos"),
        ("llama", {"attention.value_length": 8}, "'attention.value_length': 8, not 16"),
        ("llama", {"attention.head_count_kv": 3}, "'attention.head_count_kv': 3, not a divisor"),
        (
            "llama",
            {"attention.head_count": 8, "attention.key_length": 64},
            "8 heads of 64 have 512",
        ),
        ("llama", {"attention.temperature_scale": 0.1}, "'attention.temperature_scale': 0.1"),
        (
            "ministral3",
            {"rope.scaling.original_context_length": None},
            "'rope.scaling.original_context_length'",
        ),
        ("llama", {"attention.head_count_kv": [1, 2]}, "'attention.head_count_kv': [1, 2]"),
        ("llama", {"block_count": 1 << 30}, "'block_count': 1073741824, not a number"),
        ("qwen3", {"attention.clamp_kqv": 8.0}, "'attention.clamp_kqv': 8.0, which is not"),
        ("qwen3", {"attention.layer_norm_rms_epsilon": 0.0}, "lacks 'attention.layer_norm_rms"),
        (
            "olmo2",
            {"attention.sliding_window": 5, "attention.sliding_window_pattern": 0},
            "'attention.sliding_window_pattern': 0, not a positive integer",
        ),
        ("granite", {"rope.scaling.finetuned": False}, "'rope.scaling.finetuned': False"),
        ("gemma2", {"attention.sliding_window_pattern": 0}, "0, not a positive integer"),
        ("gemma2", {"attention.sliding_window_pattern": [True]}, "[True], not a list of 2"),
        ("qwen2", {"rope.dimension_sections": [1.5, 2.5, 4.0]}, "[1.5, 2.5, 4.0], not a list"),
        ("phi3", {"rope.dimension_count": 1 << 30}, "'rope.dimension_count': 1073741824, not 16"),
    ],
)
def test_keys_that_cannot_be_executed_are_named(
    model_type: str, keys: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as refused:
        lowered(tmp_path, model_type, keys, head_dim=None)
    assert complaint in str(refused.value)
    assert "tiny.gguf" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "length", "complaint"),
    [
        ("long", 8, "'rope_factors_short.weight' is missing"),
        ("short", 5, r"'rope_factors_short.weight' has shape \(5,\), not \(8,\)"),
        ("short", 8, "lacks 'rope.scaling.original_context_length'"),
    ],
)
def test_factors_of_longrope_that_do_not_fit_are_named(
    name: str, length: int, complaint: str, tmp_path: Path
) -> None:
    factors = {f"rope_factors_{name}.weight": np.ones(length, np.float32)}
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("phi3", head_dim=None), extra=factors)
    with pytest.raises(ModelError, match=complaint):
        open_model(path)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [([1, 3, 5], (1, 2)), ([0, 4], (0, 4)), ([4], (4, 5)), ([1], (1, 5)), ([], (6, 7))],
)
def test_periods_give_back_the_layers_of_a_kind(
    layers: list[int], expected: tuple[int, int]
) -> None:
    found = periods(ConfigFields({}, "a file"), "expert_count", "expert", layers, 6)
    assert tuple(found.values()) == expected
    offset, period = expected
    assert [i for i in range(6) if i % period == offset] == layers


@pytest.mark.parametrize("layers", [[1, 2, 5], [3, 4], [0, 2], [0, 1, 2]])
def test_layers_that_do_not_recur_evenly_are_named(layers: list[int]) -> None:
    fields = ConfigFields({"expert_count": 4}, "tiny.gguf")
    with pytest.raises(ModelError, match=r"'expert_count': 4, not of layers as far .* those of"):
        periods(fields, "expert_count", "expert", layers, 6)
