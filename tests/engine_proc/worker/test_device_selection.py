"""Where a model runs: what flags ask for, as far as there is a GPU that can do it."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_configs import execution_config
from random_decoders import GEMMA_SPECS, LATENTS, MAMBA, MAMBA2, SPEC, SPECS, random_weights

from headrace.engine_proc.worker.backend_selection import TRANSFORMERS, foresee
from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor
from headrace.engine_proc.worker.device_selection import (
    Device,
    check_on_cpu,
    choose,
    falls_to_modules,
    find_gpus,
    lacking_kernel,
    place,
    why_not_on_gpus,
)
from headrace.engine_proc.worker.models.compute_dtype import dtype_on_gpus
from headrace.engine_proc.worker.models.model import DecoderModel
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    Activation,
    AltUpSpec,
    EncoderSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    Mamba2Spec,
    Mixer,
    MixtureSpec,
    NormPlacement,
    RouterScore,
    ShortConvSpec,
)
from headrace.errors import ConfigError, ModelError
from headrace.system import machine

NO_GPU = "this machine has no NVIDIA GPU"


@pytest.mark.parametrize(
    ("asked", "why_not", "no_gpu", "device"),
    [
        ("auto", "", "", Device("cuda", "there is a GPU")),
        ("auto", "", NO_GPU, Device("cpu", NO_GPU)),
        ("auto", "--quantization int8", "", Device("cpu", "--quantization int8")),
        ("cuda", "", "", Device("cuda", "--device says so")),
        ("cpu", "", "", Device("cpu", "--device says so")),
    ],
)
def test_a_gpu_is_used_where_it_can_be(
    asked: str, why_not: str, no_gpu: str, device: Device
) -> None:
    assert choose(asked, why_not, lambda: no_gpu) == device


def test_what_is_asked_for_in_vain_is_refused_with_the_reason() -> None:
    with pytest.raises(ModelError, match=f"^--device cuda: {NO_GPU}; use --device cpu$"):
        choose("cuda", "", lambda: NO_GPU)
    with pytest.raises(ModelError, match="--device cuda: int8 is not for them"):
        choose("cuda", "int8 is not for them", lambda: pytest.fail("GPUs are searched"))


def stored_as(format: Format, placement: NormPlacement = NormPlacement.PRE) -> DecoderModel:
    spec = dataclasses.replace(SPEC, architecture="tiny", placement=placement)
    embed = StoredTensor(format, (0, 1), np.empty(0, np.uint8))
    return DecoderModel(spec, {"embed": embed}, eos_ids=())


def with_mamba2(model: DecoderModel) -> DecoderModel:
    mixer = Mamba2Spec(num_heads=2, head_dim=4, state_size=4, num_groups=1, kernel_size=2)
    layer = dataclasses.replace(model.spec.layers[0], mixer=mixer)
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, layers=(layer,)))


def activated_by(activation: Activation) -> DecoderModel:
    model = stored_as(Format.F16)
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, activation=activation))


@pytest.mark.parametrize(
    ("asked", "model", "flags", "dtype"),
    [
        ("auto", stored_as(Format.F16), {}, "float16"),
        ("auto", stored_as(Format.F16), {"quantization": "fp8"}, "bfloat16"),
        ("auto", stored_as(Format.F16, NormPlacement.PRE_POST), {}, "bfloat16"),
        ("auto", with_mamba2(stored_as(Format.F16)), {}, "bfloat16"),
        ("auto", activated_by(Activation.RELU2), {}, "bfloat16"),
        ("auto", activated_by(Activation.XIELU), {}, "bfloat16"),
        ("auto", activated_by(Activation.GELU), {}, "float16"),
        ("auto", stored_as(Format.F16), {"kv_cache_dtype": "bfloat16"}, "bfloat16"),
        ("auto", stored_as(Format.BF16), {}, "bfloat16"),
        ("auto", stored_as(Format.F32), {}, "bfloat16"),
        ("auto", stored_as(Format.Q6_K), {}, "bfloat16"),
        ("float16", stored_as(Format.BF16), {}, "float16"),
        ("bfloat16", stored_as(Format.F16), {}, "bfloat16"),
        ("float32", stored_as(Format.F16), {}, "float32"),
    ],
)
def test_gpus_compute_in_the_type_of_the_file(
    asked: str, model: DecoderModel, flags: dict[str, str], dtype: str
) -> None:
    assert dtype_on_gpus(execution_config(dtype=asked, **flags), model) == dtype


def test_float16_is_refused_when_too_narrow_or_not_computed_in() -> None:
    with pytest.raises(ModelError, match=r"^--dtype float16 ends at 65504, which tiny models pass"):
        dtype_on_gpus(
            execution_config(dtype="float16"), stored_as(Format.BF16, NormPlacement.PRE_POST)
        )
    check_on_cpu(execution_config(), NO_GPU)
    for flag in ("dtype", "kv_cache_dtype"):
        text = f"float16 is for GPUs, .* CPU: {NO_GPU}; use bfloat16 or float32$"
        with pytest.raises(ConfigError, match=text):
            check_on_cpu(execution_config(**{flag: "float16"}), NO_GPU)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({}, ""),
        ({"dtype": "float32", "kv_cache_dtype": "float32"}, ""),
        ({"kv_cache_dtype": "bfloat16"}, ""),
        ({"kv_cache_dtype": "float32"}, "--kv-cache-dtype float32"),
        ({"dtype": "float32", "kv_cache_dtype": "bfloat16"}, "--kv-cache-dtype bfloat16"),
        ({"dtype": "float16", "kv_cache_dtype": "float16"}, ""),
        ({"dtype": "float16", "kv_cache_dtype": "bfloat16"}, "--kv-cache-dtype bfloat16"),
        ({"quantization": "int8"}, "--quantization int8 is for CPUs"),
    ],
)
def test_what_gpus_cannot_do_is_named(flags: dict[str, str], text: str) -> None:
    config = execution_config("model.gguf", **flags)
    why_not = why_not_on_gpus(config, flags.get("dtype", "bfloat16"))
    assert text in why_not
    assert bool(text) == bool(why_not)


CONVOLUTION = ShortConvSpec(channels=64, kernel_size=3)
DELTA_NET = GatedDeltaNetSpec(
    num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=16, kernel_size=4
)


MIXTURE = MixtureSpec(num_experts=4, experts_per_token=2, intermediate_size=32)


def mixture(**fields: Any) -> dict[str, Any]:
    """Return layers of which one is a mixture."""
    own = dataclasses.replace(MIXTURE, **fields)
    return {"layers": (LayerSpec(), LayerSpec(mixture=own))}


def test_mixtures_run_on_gpus_but_for_a_few() -> None:
    assert lacking_kernel(dataclasses.replace(SPEC, **mixture())) == ""
    ungated = mixture(router_bias=True, shared_gate=True) | {"gated_mlp": False}
    assert lacking_kernel(dataclasses.replace(SPEC, activation=Activation.RELU2, **ungated)) == ""
    assert lacking_kernel(dataclasses.replace(SPEC, **mixture(weighs_inputs=True))) == ""
    sparse = mixture(score=RouterScore.SPARSEMIXER, normalized=False)
    assert lacking_kernel(dataclasses.replace(SPEC, **sparse)) == ""
    assert lacking_kernel(dataclasses.replace(SPEC, **mixture(own_norms=True))) == ""
    model = DecoderModel(dataclasses.replace(SPEC, encoder=EncoderSpec()), {}, ())
    lack = "tokens that see their whole text"
    why = f"a LlamaForCausalLM model has {lack}, which GPU workers cannot run"
    assert place(execution_config("model.gguf"), model) == Device("cpu", why)
    with pytest.raises(ModelError, match=f"^--device cuda: {why}; use --device cpu$"):
        place(execution_config("model.gguf", device="cuda"), model)


@pytest.mark.parametrize(
    ("differences", "lack"),
    [
        ({"layer_scale": True}, "norms around its layers of another kind than Gemma's"),
        (
            {"altup": AltUpSpec(num_inputs=2, rank=3), "placement": NormPlacement.PRE_POST},
            "several residuals without embeddings for each layer",
        ),
        (
            {"layers": (LayerSpec(mixer=LATENTS["deepseek"].latent, window=8),)},
            "windows of latent attention",
        ),
    ],
)
def test_decoders_that_lack_a_kernel_run_on_the_cpu(differences: dict[str, Any], lack: str) -> None:
    model = DecoderModel(dataclasses.replace(SPEC, **differences), {}, ())
    why = f"a LlamaForCausalLM model has {lack}, which GPU workers cannot run"
    assert place(execution_config("model.gguf"), model) == Device("cpu", why)


@pytest.mark.parametrize("name", GEMMA_SPECS)
def test_gemmas_with_more_around_layers_run_on_gpus(name: str) -> None:
    assert lacking_kernel(GEMMA_SPECS[name]) == ""


@pytest.mark.parametrize("name", SPECS)
def test_dense_decoders_run_on_gpus(name: str) -> None:
    assert lacking_kernel(SPECS[name]) == ""


def hybrid(mixer: Mixer) -> DecoderModel:
    spec = dataclasses.replace(SPEC, layers=(LayerSpec(mixer=mixer), LayerSpec()))
    return DecoderModel(spec, random_weights(spec), ())


@pytest.mark.parametrize("mixer", [CONVOLUTION, DELTA_NET, MAMBA2, MAMBA])
def test_layers_with_states_run_on_gpus(mixer: Mixer, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid(mixer)
    spec = dataclasses.replace(model.spec, attention_gate=True, gated_mlp=False)
    assert lacking_kernel(spec) == ""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    on_gpus = execution_config("model.gguf", device="cuda", kv_store_bytes=7, tp=3)
    assert place(on_gpus, model).name == "cuda"
    assert place(dataclasses.replace(on_gpus, device="cpu"), model).name == "cpu"


def test_models_of_images_do_not_fall_to_modules(tmp_path: Path) -> None:
    model = DecoderModel(dataclasses.replace(SPEC, layer_scale=True), {}, ())
    config = execution_config(tmp_path, device="cuda")
    assert falls_to_modules(config, model)
    takes_images = dataclasses.replace(config, image_row_size=64)
    assert not falls_to_modules(takes_images, model)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="has norms around its layers of another kind"):
        place(takes_images, model)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("dtype", "float16"),
        ("kv_cache_dtype", "fp8"),
        ("attention_backend", "triton"),
        ("quantization", "int8"),
    ],
)
def test_it_is_foreseen_what_transformers_cannot_do(flag: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = execution_config(tmp_path, model_impl="transformers")
    assert foresee(config).executor == TRANSFORMERS
    with pytest.raises((ConfigError, ModelError), match=f"--{flag.replace('_', '-')} {value}"):
        foresee(dataclasses.replace(config, **{flag: value}))


def test_gpus_are_looked_for_step_by_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert find_gpus("cuda", 1) == ""
    assert "is for tests" in find_gpus("auto", 1)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(machine, "NVIDIA", tmp_path / "nothing")
    assert find_gpus("cuda", 1) == NO_GPU
    monkeypatch.setattr(machine, "NVIDIA", tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = "the package torch is missing; `pip install 'headrace[gpu]'`"
    assert find_gpus("auto", 1) == text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_gpus("auto", 1) == "CUDA_VISIBLE_DEVICES hides all GPUs"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"version": None}, "is built without CUDA"),
        ({"is_available": False}, "finds no GPU; it is built for CUDA 13.0"),
        ({"device_count": 1}, "--tp 2 takes 2 GPUs, and there are 1"),
        ({"get_device_capability": (7, 5)}, "T4 is older than Ampere"),
        ({}, ""),
    ],
)
def test_what_torch_says_of_gpus(
    changes: dict[str, object], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from headrace.engine_proc.worker.cuda.kernels import gpu_requirements

    said = {
        "is_available": True,
        "device_count": 2,
        "get_device_capability": (9, 0),
        "get_device_name": "T4",
        **changes,
    }
    monkeypatch.setattr(torch.version, "cuda", said.pop("version", "13.0"))
    for name, value in said.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_args, value=value: value)
    assert gpu_requirements.find(2).endswith(text) and bool(gpu_requirements.find(2)) == bool(text)
