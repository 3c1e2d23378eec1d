"""The weights of a gated delta net, and where files have them."""

from collections.abc import Mapping

from headrace.engine_proc.worker.checkpoints.weights import Weight
from headrace.engine_proc.worker.models.specs.decoder_spec import GatedDeltaNetSpec
from headrace.engine_proc.worker.models.weight_source import WeightSource, interleaved


def delta_net_shapes(hidden: int, delta: GatedDeltaNetSpec) -> dict[str, tuple[int, ...]]:
    """Return the weights of a gated delta net."""
    keys, values, heads = delta.key_width, delta.value_width, delta.num_value_heads
    gate_columns = delta.gate_rank or hidden
    shapes: dict[str, tuple[int, ...]] = {
        "delta.q": (keys, hidden),
        "delta.k": (keys, hidden),
        "delta.v": (values, hidden),
        "delta.b": (heads, hidden),
        "delta.z": (values, gate_columns),
        "delta.a": (delta.num_decays, gate_columns),
    }
    if delta.gate_rank:
        shapes["delta.z_in"] = shapes["delta.a_in"] = (delta.gate_rank, hidden)
    for name, width in zip("qkv", (keys, keys, values), strict=True):
        shapes[f"delta.{name}.conv"] = (width * delta.kernel_size,)
    return shapes | {
        "delta.a.bias": (delta.num_decays,),
        "delta.rate": (heads,),
        "delta.gated_norm": (delta.value_dim,),
        "delta.out": (hidden, values),
    }


def hf_delta_net(
    delta: GatedDeltaNetSpec, ours: str, theirs: str, tensors: Mapping[str, Weight]
) -> dict[str, WeightSource]:
    """Name the weights of a gated delta net. Qwen3-Next's alternate by key head."""
    sources = {
        "a.bias": WeightSource(f"{theirs}dt_bias"),
        "rate": WeightSource(f"{theirs}A_log", is_logarithm=True),
        "gated_norm": WeightSource(f"{theirs}norm.weight"),
        "out": WeightSource(f"{theirs}out_proj.weight"),
        **{name: WeightSource(f"{theirs}in_proj_{name}.weight") for name in "zba"},
        **delta_convs(delta, f"{theirs}conv1d.weight"),
        **delta_rows(delta, f"{theirs}in_proj_qkv.weight"),
    }
    if f"{theirs}in_proj_qkvz.weight" in tensors:
        group = delta.num_value_heads // delta.num_key_heads
        key, value = delta.key_dim, group * delta.value_dim
        sources |= interleaved(f"{theirs}in_proj_qkvz.weight", q=key, k=key, v=value, z=value)
        sources |= interleaved(f"{theirs}in_proj_ba.weight", b=group, a=group)
    return {ours + name: source for name, source in sources.items()}


def gguf_delta_net(
    delta: GatedDeltaNetSpec, ours: str, theirs: str, tensors: Mapping[str, Weight]
) -> dict[str, WeightSource]:
    """Name the tensors of a GGUF file. Only gates of Qwen3-Next still alternate there."""
    sources = {
        "z": WeightSource(f"{theirs}attn_gate.weight"),
        "b": WeightSource(f"{theirs}ssm_beta.weight"),
        "a": WeightSource(f"{theirs}ssm_alpha.weight"),
        "a.bias": WeightSource(f"{theirs}ssm_dt.bias"),
        "rate": WeightSource(f"{theirs}ssm_a"),
        "gated_norm": WeightSource(f"{theirs}ssm_norm.weight"),
        "out": WeightSource(f"{theirs}ssm_out.weight"),
        **delta_convs(delta, f"{theirs}ssm_conv1d.weight"),
        **delta_rows(delta, f"{theirs}attn_qkv.weight"),
    }
    if f"{theirs}ssm_ba.weight" in tensors:
        group = delta.num_value_heads // delta.num_key_heads
        sources |= interleaved(f"{theirs}ssm_ba.weight", b=group, a=group)
    return {ours + name: source for name, source in sources.items()}


def delta_rows(delta: GatedDeltaNetSpec, tensor: str, unit: int = 1) -> dict[str, WeightSource]:
    """Name the rows of queries, keys and values, or their numbers, `unit` of each row."""
    first = {"q": 0, "k": delta.key_width, "v": 2 * delta.key_width}
    return {name: WeightSource(tensor, row * unit) for name, row in first.items()}


def delta_convs(delta: GatedDeltaNetSpec, tensor: str) -> dict[str, WeightSource]:
    """Name the weights of the convolution."""
    rows = delta_rows(delta, tensor, delta.kernel_size)
    return {f"{name}.conv": source for name, source in rows.items()}
