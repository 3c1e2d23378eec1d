"""The shape of each weight that a decoder has."""

from headrace.engine_proc.worker.checkpoints.weights import Weights
from headrace.engine_proc.worker.models.delta_net_names import delta_net_shapes
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    Activation,
    DecoderSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    MambaSpec,
    Mixer,
    MixtureSpec,
    NormPlacement,
    QKNorm,
    ShortConvSpec,
)
from headrace.errors import ModelError

Shape = tuple[int, ...]
XIELU = ("xielu.alpha_p", "xielu.alpha_n", "xielu.beta", "xielu.eps")  # alphas before softplus


def weight_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    """Return every weight the decoder has, under our names (see `weights.py`)."""
    num_embedded = spec.vocab_size if spec.eagle is None else spec.eagle.num_embedded
    shapes: dict[str, Shape] = {}
    has_tied_head = spec.tied_head and not spec.gives_hidden
    if has_tied_head or not spec.takes_hidden:
        shapes["embed"] = (num_embedded, spec.hidden_size)
    if not spec.gives_hidden:
        shapes |= head_shapes(spec)
        shapes |= outer_norm_shapes(spec)
    shapes |= outer_gemma_shapes(spec)
    if spec.eagle is not None:
        shapes |= eagle_shapes(spec.hidden_size, len(spec.eagle.tapped))
    elif spec.num_mtp_layers:
        shapes |= mtp_shapes(spec.hidden_size)
    for i, layer in enumerate(spec.layers):
        of_layer = norm_shapes(spec, layer)
        if i == 0 and spec.encoder is not None and not spec.encoder.first_norm:
            of_layer = {k: v for k, v in of_layer.items() if not k.startswith("attn_norm")}
        if layer.attends:
            of_layer |= attention_shapes(spec, layer)
        of_layer |= mixer_shapes(spec, layer.mixer)
        if layer.mixture is not None:
            of_layer |= mixture_shapes(spec.hidden_size, layer.mixture, spec.gated_mlp)
        elif layer.has_mlp:
            of_layer |= mlp_shapes(
                spec.hidden_size, spec.mlp_size_of(layer), spec.mlp_bias, gated=spec.gated_mlp
            )
            of_layer |= dict.fromkeys(XIELU if spec.activation == Activation.XIELU else (), (1,))
        of_layer |= gemma_shapes(spec)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def check_shapes(spec: DecoderSpec, weights: Weights) -> None:
    """Raise ModelError if a weight is missing or has the wrong shape."""
    for name, shape in weight_shapes(spec).items():
        if name not in weights:
            raise ModelError(f"weight {name!r} is missing")
        if weights[name].shape != shape:
            raise ModelError(
                f"weight {name!r} has shape {list(weights[name].shape)}, not {list(shape)}"
            )


def head_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    """Return the head's matrix, where it is not the embedding, and its bias."""
    shapes: dict[str, Shape] = {}
    if not spec.tied_head:
        shapes["head"] = (spec.vocab_size, spec.hidden_size)
    if spec.head_bias:
        shapes["head.bias"] = (spec.vocab_size,)
    return shapes


def outer_norm_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    """Return the weights of the norm behind all layers; of an encoder, all before them, too."""
    encoder, hidden = spec.encoder, spec.hidden_size
    last = linear_shapes("norm", (hidden,), spec.norm_bias)
    if encoder is None:
        return last
    shapes = last if encoder.last_norm else {}
    if encoder.embed_norm:
        shapes |= linear_shapes("embed_norm", (hidden,), spec.norm_bias)
    if encoder.num_positions:
        shapes["positions"] = (encoder.num_positions, hidden)
    if encoder.num_token_types:
        shapes["token_types"] = (encoder.num_token_types, hidden)
    return shapes


def mtp_shapes(hidden: int) -> dict[str, Shape]:
    """Return what stands around the layer that drafts."""
    norms = ("mtp.embed_norm", "mtp.hidden_norm", "mtp.norm")
    return {"mtp.proj": (hidden, 2 * hidden), **dict.fromkeys(norms, (hidden,))}


def eagle_shapes(hidden: int, num_tapped: int) -> dict[str, Shape]:
    """Return what stands around EAGLE-3's layer."""
    return {"mtp.proj": (hidden, num_tapped * hidden), "mtp.hidden_norm": (hidden,)}


def mixer_shapes(spec: DecoderSpec, mixer: Mixer | None) -> dict[str, Shape]:
    """Return the weights of a layer's mixer; of plain attention none."""
    match mixer:
        case ShortConvSpec():
            return short_conv_shapes(spec.hidden_size, mixer)
        case GatedDeltaNetSpec():
            return delta_net_shapes(spec.hidden_size, mixer)
        case Mamba2Spec():
            return mamba2_shapes(spec.hidden_size, mixer)
        case MambaSpec():
            return mamba_shapes(spec.hidden_size, mixer)
        case LatentAttentionSpec():
            return latent_attention_shapes(spec, mixer)
    return {}


def norm_shapes(spec: DecoderSpec, layer: LayerSpec) -> dict[str, Shape]:
    """Return the weights of a layer's norms."""
    are_behind = spec.placement in (NormPlacement.POST, NormPlacement.POST_SUM)
    norms = [] if are_behind else ["attn_norm"]
    if not are_behind and spec.placement != NormPlacement.PARALLEL:
        norms.append("mlp_norm")
    if are_behind or spec.placement == NormPlacement.PRE_POST:
        norms += ["attn_post_norm", "mlp_post_norm"]
    has = {"attn": layer.has_mixer, "mlp": layer.has_mlp}
    shapes: dict[str, Shape] = {}
    for name in norms:
        if has[name.split("_")[0]]:
            shapes |= linear_shapes(name, (spec.hidden_size,), spec.norm_bias)
    return shapes


def outer_gemma_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    """Return what is not a layer's of embeddings per layer, and of several residuals."""
    shapes: dict[str, Shape] = {}
    hidden = spec.hidden_size
    if (own := spec.per_layer) is not None:
        width = len(spec.layers) * own.size
        shapes["per_layer.embed"] = (own.vocab_size, width)
        shapes["per_layer.proj"] = (width, hidden)
        shapes["per_layer.proj_norm"] = (own.size,)
    if (altup := spec.altup) is not None:
        for i in range(1, altup.num_inputs):
            shapes[f"altup.in.{i}"] = shapes[f"altup.out.{i}"] = (hidden, hidden)
    return shapes


def gemma_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    """Return what each layer has of these, and the number that the residual is multiplied by."""
    hidden = spec.hidden_size
    shapes: dict[str, Shape] = {"scale": (1,)} if spec.layer_scale else {}
    if (own := spec.per_layer) is not None:
        shapes["per_layer.gate"] = (own.size, hidden)
        shapes["per_layer.out"] = (hidden, own.size)
        shapes["per_layer.norm"] = (hidden,)
    if (altup := spec.altup) is not None:
        count = altup.num_inputs
        shapes["altup.router"] = (count, hidden)
        shapes["altup.predict"] = (count * count, count)
        shapes["altup.correct"] = (count, count)
        shapes["altup.norm"] = (hidden,)
        shapes["altup.scale"] = (hidden,)
        shapes["laurel.left"] = (altup.rank, hidden)
        shapes["laurel.right"] = (hidden, altup.rank)
        shapes["laurel.norm"] = (hidden,)
    return shapes


def attention_shapes(spec: DecoderSpec, layer: LayerSpec) -> dict[str, Shape]:
    """Return the weights of a layer's attention."""
    hidden, (num_kv_heads, head_dim) = spec.hidden_size, spec.kv_heads_of(layer)
    read = hidden if spec.eagle is None else 2 * hidden
    q, kv = spec.num_heads * head_dim, num_kv_heads * head_dim
    shapes: dict[str, Shape] = {}
    if spec.qk_norm in (QKNorm.PER_HEAD, QKNorm.PER_HEAD_AFTER_ROPE):
        shapes |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
    elif spec.qk_norm == QKNorm.FULL:
        shapes |= {"q_norm": (q,), "k_norm": (kv,)}
    if spec.attention_sinks:
        shapes["sinks"] = (spec.num_heads,)
    for name, shape, bias in (
        ("q", (q, read), spec.qkv_bias),
        ("k", (kv, read), spec.qkv_bias),
        ("v", (kv, read), spec.qkv_bias),
        ("o", (hidden, q), spec.output_bias),
    ):
        shapes |= linear_shapes(name, shape, bias)
    if spec.attention_gate:
        shapes |= linear_shapes("attn_gate", (q, hidden), spec.qkv_bias)
    lacks = {*("" if layer.has_values else "v"), *("" if layer.owns_keys else ("k", "v", "k_norm"))}
    return {name: s for name, s in shapes.items() if name.removesuffix(".bias") not in lacks}


def short_conv_shapes(hidden: int, conv: ShortConvSpec) -> dict[str, Shape]:
    """Return the weights of a short convolution. Those of one channel are adjacent in `conv`."""
    shapes: dict[str, Shape] = {"conv": (conv.channels * conv.kernel_size,)}
    for name in ("in_b", "in_c", "in_x"):
        shapes |= linear_shapes(name, (conv.channels, hidden), conv.bias)
    shapes |= linear_shapes("out", (hidden, conv.channels), conv.bias)
    return shapes | ({"conv.bias": (conv.channels,)} if conv.bias else {})


def is_one_plus(spec: DecoderSpec, name: str) -> bool:
    """Whether a weight is of a norm that scales by 1 + w."""
    is_norm = name.endswith("norm") and not name.endswith("gated_norm")
    return is_norm and spec.norm.adds_one


def mamba2_shapes(hidden: int, mamba2: Mamba2Spec) -> dict[str, Shape]:
    """Return the weights of Mamba-2. Those of one channel are adjacent in a convolution."""
    inner, of_groups, heads = mamba2.inner_size, mamba2.group_numbers, len(mamba2.heads)
    convolved = {"x": inner, "b": of_groups, "c": of_groups}
    shapes: dict[str, Shape] = {}
    for name, count in {"z": inner, **convolved, "dt": heads}.items():
        shapes |= linear_shapes(f"in_{name}", (count, hidden), mamba2.input_bias)
    for name, count in convolved.items():
        shapes[f"conv_{name}"] = (count * mamba2.kernel_size,)
        if mamba2.conv_bias:
            shapes[f"conv_{name}.bias"] = (count,)
    shapes |= {name: (heads,) for name in ("dt_bias", "decay", "skip")}
    if mamba2.norm_size:
        shapes["ssm_norm"] = (inner,)
    return shapes | linear_shapes("out", (hidden, inner), mamba2.output_bias)


def mamba_shapes(hidden: int, mamba: MambaSpec) -> dict[str, Shape]:
    """Return the weights of Mamba. Those of one channel are adjacent in vectors."""
    channels, size, rank = mamba.channels, mamba.state_size, mamba.rank
    shapes: dict[str, Shape] = {
        "conv_x": (channels * mamba.kernel_size,),
        "in_dt": (rank, channels),
        "in_b": (size, channels),
        "in_c": (size, channels),
        "dt": (channels, rank),
        "dt_bias": (channels,),
        "decay": (channels * size,),
        "skip": (channels,),
    }
    if mamba.conv_bias:
        shapes["conv_x.bias"] = (channels,)
    if mamba.norms:
        shapes |= {"dt_norm": (rank,), "b_norm": (size,), "c_norm": (size,)}
    for name in ("in_x", "in_z"):
        shapes |= linear_shapes(name, (channels, hidden), mamba.bias)
    return shapes | linear_shapes("out", (hidden, channels), mamba.bias)


def latent_attention_shapes(spec: DecoderSpec, latent: LatentAttentionSpec) -> dict[str, Shape]:
    """Return the weights of a latent attention."""
    hidden, heads = spec.hidden_size, spec.num_heads
    shapes: dict[str, Shape] = {}
    if latent.query_rank is None:
        shapes["q"] = (heads * latent.query_dim, hidden)
    else:
        shapes |= linear_shapes("q_a", (latent.query_rank, hidden), latent.bias)
        shapes["q_a_norm"] = (latent.query_rank,)
        shapes["q_b"] = (heads * latent.query_dim, latent.query_rank)
    shapes |= linear_shapes("kv_a", (latent.latent_dim, hidden), latent.bias)
    shapes["kv_a_norm"] = (latent.rank,)
    shapes["k_b"] = (heads * latent.rank, latent.nope_dim)
    shapes["v_b"] = (heads * latent.value_dim, latent.rank)
    return shapes | linear_shapes("o", (hidden, heads * latent.value_dim), spec.output_bias)


def mlp_shapes(
    hidden: int, inner: int, bias: bool, prefix: str = "", gated: bool = True
) -> dict[str, Shape]:
    """Return the weights of an MLP."""
    return {
        **(linear_shapes(f"{prefix}gate", (inner, hidden), bias) if gated else {}),
        **linear_shapes(f"{prefix}up", (inner, hidden), bias),
        **linear_shapes(f"{prefix}down", (hidden, inner), bias),
    }


def mixture_shapes(hidden: int, mixture: MixtureSpec, gated: bool) -> dict[str, Shape]:
    """Return the weights of a router, its experts and the shared MLP."""
    shapes = linear_shapes("router", (mixture.num_experts, hidden), mixture.router_bias)
    if mixture.own_norms:
        norms = ("router.norm", "expert_norm", "expert_post_norm", "shared_post_norm")
        shapes |= dict.fromkeys(norms, (hidden,))
    if mixture.expert_scales:
        shapes["router.scales"] = (mixture.num_experts,)
    if mixture.selection_bias:
        shapes["router.selection_bias"] = (mixture.num_experts,)
    for expert in mixture.own_experts:
        prefix, size = f"experts.{expert}.", mixture.intermediate_size
        shapes |= mlp_shapes(hidden, size, mixture.expert_bias, prefix, gated)
    if mixture.shared_intermediate_size:
        size = mixture.shared_intermediate_size
        shapes |= mlp_shapes(hidden, size, mixture.shared_bias, "shared.", gated)
    if mixture.shared_gate:
        shapes["shared.router"] = (1, hidden)
    return shapes


def linear_shapes(name: str, shape: Shape, bias: bool) -> dict[str, Shape]:
    """Return the weight and the bias of a linear layer or a norm."""
    return {name: shape} | ({f"{name}.bias": shape[:1]} if bias else {})
