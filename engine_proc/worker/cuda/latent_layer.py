"""Latent attention of a layer, as far as a worker has its heads."""

from torch import Tensor

from headrace.engine_proc.worker.cuda.attention.latent_attention import attend_latents
from headrace.engine_proc.worker.cuda.attention.latent_store import latent_store
from headrace.engine_proc.worker.cuda.attention.tile_schedule import Tiling
from headrace.engine_proc.worker.cuda.kernels.norm import norm
from headrace.engine_proc.worker.cuda.kernels.numerics import Scaling
from headrace.engine_proc.worker.cuda.matrices.matrices import HEAD_MATRICES, DeviceWeights
from headrace.engine_proc.worker.cuda.mixtures.expert_linear import expert_linear
from headrace.engine_proc.worker.cuda.step_inputs import DeviceStep
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec, LayerSpec


def attend_to_latents(
    weights: DeviceWeights,
    name: str,
    spec: DecoderSpec,
    layer: LayerSpec,
    x: Tensor,
    step: DeviceStep,
    latents: Tensor,
    kv_scale: float,
    tiling: Tiling,
) -> Tensor:
    """Write latents, and attend to them, [tokens, heads, value_dim].

    Each head's query is multiplied by its keys' matrix, what it attends to by its values'.

    Args:
        name: of the layer.
        x: [tokens, hidden]
        latents: the layer's pages, which are multiplied with `kv_scale`.
    """
    latent = spec.latent
    assert latent is not None
    assert step.heads is not None
    assert step.images is None or step.images.last_seen is None
    kv = weights.matrices[f"{name}.qkv_a"].apply(x)
    if latent.query_rank is None:
        q = weights.matrices[f"{name}.qkv"].apply(x)
    else:
        compressed, kv = kv[:, : latent.query_rank], kv[:, latent.query_rank :]
        weight = weights.tensors[f"{name}.q_a_norm"]
        normed = norm(compressed, weight, scaling=Scaling.RMS, eps=latent.norm_eps)
        q = weights.matrices[f"{name}.q_b"].apply(normed)
    q = q.view(len(x), spec.num_heads, latent.query_dim)
    if layer.temperature is not None:
        q *= step.query_factors[layer.temperature][:, None, None].to(q.dtype)
    turned = latent_store(
        q,
        kv,
        latents,
        step.kv_rows,
        rotations=None if layer.rope is None else step.rotations[layer.rope],
        weight=weights.tensors[f"{name}.kv_a_norm"],
        eps=latent.norm_eps,
        kv_scale=kv_scale,
    )
    of_keys, of_values = (weights.experts[f"{name}.{which}"] for which in HEAD_MATRICES)
    kept = q.flatten(0, 1)[:, : latent.nope_dim]
    attended = attend_latents(
        expert_linear(kept, of_keys, step.heads).view(len(x), spec.num_heads, latent.rank),
        turned,
        latents,
        step.stretches,
        scale=spec.attention_scale,
        kv_scale=kv_scale,
        tiling=tiling,
        schedule=step.schedules[spec.kv_heads_of(layer), layer.window, layer.is_chunked],
    )
    values = expert_linear(attended.flatten(0, 1), of_values, step.heads)
    return values.view(len(x), spec.num_heads, latent.value_dim)
