"""The names that files have for the weights of Mamba-2."""

from collections.abc import Mapping

from headrace.engine_proc.worker.checkpoints.weights import Weight
from headrace.engine_proc.worker.models.specs.decoder_spec import Mamba2Spec, MambaSpec
from headrace.engine_proc.worker.models.weight_source import WeightSource

HF_MAMBA2 = {
    "in": "in_proj.weight",
    "in.bias": "in_proj.bias",
    "conv": "conv1d.weight",
    "conv.bias": "conv1d.bias",
    "dt_bias": "dt_bias",
    "decay": "A_log",
    "skip": "D",
    "ssm_norm": "norm.weight",
    "out": "out_proj.weight",
    "out.bias": "out_proj.bias",
}
GGUF_MAMBA2 = {
    "in": "ssm_in.weight",
    "in.bias": "ssm_in.bias",
    "conv": "ssm_conv1d.weight",
    "conv.bias": "ssm_conv1d.bias",
    "dt_bias": "ssm_dt.bias",
    "decay": "ssm_a",
    "skip": "ssm_d",
    "ssm_norm": "ssm_norm.weight",
    "out": "ssm_out.weight",
    "out.bias": "ssm_out.bias",
}

HF_MAMBA = {
    "in": "in_proj.weight",
    "in.bias": "in_proj.bias",
    "conv_x": "conv1d.weight",
    "conv_x.bias": "conv1d.bias",
    "low": "x_proj.weight",
    "dt": "dt_proj.weight",
    "dt_bias": "dt_proj.bias",
    "dt_norm": "dt_layernorm.weight",
    "b_norm": "b_layernorm.weight",
    "c_norm": "c_layernorm.weight",
    "decay": "A_log",
    "skip": "D",
    "out": "out_proj.weight",
    "out.bias": "out_proj.bias",
}
GGUF_MAMBA = {
    "in": "ssm_in.weight",
    "in.bias": "ssm_in.bias",
    "conv_x": "ssm_conv1d.weight",
    "conv_x.bias": "ssm_conv1d.bias",
    "low": "ssm_x.weight",
    "dt": "ssm_dt.weight",
    "dt_bias": "ssm_dt.bias",
    "dt_norm": "ssm_dt_norm.weight",
    "b_norm": "ssm_b_norm.weight",
    "c_norm": "ssm_c_norm.weight",
    "decay": "ssm_a",
    "skip": "ssm_d",
    "out": "ssm_out.weight",
    "out.bias": "ssm_out.bias",
}


def mamba_parts(
    mamba: MambaSpec, ours: str, theirs: str, names: Mapping[str, str]
) -> dict[str, WeightSource]:
    """Name the weights of Mamba: x and z are rows of one projection; dt, B and C of another."""
    sources = {
        ours + o: WeightSource(theirs + t, is_logarithm=t == "A_log") for o, t in names.items()
    }
    for bias in ("", ".bias"):
        for part, first in (("x", 0), ("z", mamba.channels)):
            sources[f"{ours}in_{part}{bias}"] = WeightSource(theirs + names[f"in{bias}"], first)
    firsts = {"dt": 0, "b": mamba.rank, "c": mamba.rank + mamba.state_size}
    for part, first in firsts.items():
        sources[f"{ours}in_{part}"] = WeightSource(theirs + names["low"], first)
    return sources


def mamba2_module(layer: str, tensors: Mapping[str, Weight]) -> str:
    """Return where a folder has the weights of Mamba-2."""
    return f"{layer}mixer." if f"{layer}mixer.in_proj.weight" in tensors else f"{layer}mamba."


def mamba2_parts(
    mamba2: Mamba2Spec, ours: str, theirs: str, names: Mapping[str, str]
) -> dict[str, WeightSource]:
    """Name the weights of Mamba-2: rows of one projection, and of one convolution."""
    inner, of_groups = mamba2.inner_size, mamba2.group_numbers
    sources = {
        ours + o: WeightSource(theirs + t, is_logarithm=t == "A_log") for o, t in names.items()
    }
    counts = {"z": inner, "x": inner, "b": of_groups, "c": of_groups, "dt": len(mamba2.heads)}
    first = 0
    for part, count in counts.items():
        for bias in ("", ".bias"):
            sources[f"{ours}in_{part}{bias}"] = WeightSource(theirs + names[f"in{bias}"], first)
        first += count
    first = 0
    for part in ("x", "b", "c"):
        for bias, unit in (("", mamba2.kernel_size), (".bias", 1)):
            source = WeightSource(theirs + names[f"conv{bias}"], first * unit)
            sources[f"{ours}conv_{part}{bias}"] = source
        first += counts[part]
    return sources
