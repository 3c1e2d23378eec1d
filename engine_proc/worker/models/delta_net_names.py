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
    if delta.gate_rank:
        return kimi(ours, theirs.replace("linear_attn.", "self_attn."), HF_KIMI)
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
    if delta.gate_rank:
        return kimi(ours, theirs, GGUF_KIMI)
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


HF_KIMI = {
    "q": "q_proj.weight",
    "k": "k_proj.weight",
    "v": "v_proj.weight",
    "q.conv": "q_conv1d.weight",
    "k.conv": "k_conv1d.weight",
    "v.conv": "v_conv1d.weight",
    "b": "b_proj.weight",
    "a_in": "f_a_proj.weight",
    "a": "f_b_proj.weight",
    "a.bias": "dt_bias",
    "rate": "A_log",
    "z_in": "g_a_proj.weight",
    "z": "g_b_proj.weight",
    "gated_norm": "o_norm.weight",
    "out": "o_proj.weight",
}
GGUF_KIMI = {
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q.conv": "ssm_conv1d_q.weight",
    "k.conv": "ssm_conv1d_k.weight",
    "v.conv": "ssm_conv1d_v.weight",
    "b": "ssm_beta.weight",
    "a_in": "ssm_f_a.weight",
    "a": "ssm_f_b.weight",
    "a.bias": "ssm_dt.bias",
    "rate": "ssm_a",
    "z_in": "ssm_g_a.weight",
    "z": "ssm_g_b.weight",
    "gated_norm": "ssm_norm.weight",
    "out": "attn_output.weight",
}


def kimi(ours: str, theirs: str, names: Mapping[str, str]) -> dict[str, WeightSource]:
    """Name the weights of Kimi's, whose matrices are apart."""
    return {
        ours + name: WeightSource(theirs + tensor, is_logarithm=tensor == "A_log")
        for name, tensor in names.items()
    }
