"""Maps tensors of encoders' files to weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.engine_proc.worker.checkpoints.weights import Weight
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.engine_proc.worker.models.weight_source import WeightSource

# Numbers that old files have and no executor reads: they cannot all be executed.
POSITION_IDS = tuple(
    f"{prefix}embeddings.position_ids"
    for prefix in ("", "bert.", "roberta.", "electra.", "distilbert.")
)


@dataclass(frozen=True, kw_only=True)
class EncoderNames:
    """The names of modules in a base model, which has `prefix` in one with a head."""

    prefix: str
    layers: str  # before a layer's number
    in_layer: Mapping[str, str]  # by our names
    outer: Mapping[str, str]
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # modules of several weights
    parts: tuple[str, ...] = ("embeddings.", "encoder.")  # of the base model, but for a pooler


BERT_LAYER = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
    "attn_post_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_post_norm": "output.LayerNorm",
}
BERT_OUTER = {
    "embed": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "embed_norm": "embeddings.LayerNorm",
}


def like_bert(prefix: str) -> EncoderNames:
    """Return the names of a model that has BERT's within."""
    return EncoderNames(
        prefix=prefix, layers="encoder.layer.", in_layer=BERT_LAYER, outer=BERT_OUTER
    )


ENCODER_NAMES = {
    "bert": like_bert("bert."),
    "camembert": like_bert("roberta."),
    "roberta": like_bert("roberta."),
    "xlm-roberta": like_bert("roberta."),
    "electra": like_bert("electra."),
    "distilbert": EncoderNames(
        prefix="distilbert.",
        layers="transformer.layer.",
        in_layer={
            "q": "attention.q_lin",
            "k": "attention.k_lin",
            "v": "attention.v_lin",
            "o": "attention.out_lin",
            "attn_post_norm": "sa_layer_norm",
            "up": "ffn.lin1",
            "down": "ffn.lin2",
            "mlp_post_norm": "output_layer_norm",
        },
        outer=BERT_OUTER,
        parts=("embeddings.", "transformer."),
    ),
    "modernbert": EncoderNames(
        prefix="model.",
        layers="layers.",
        in_layer={
            "attn_norm": "attn_norm",
            "o": "attn.Wo",
            "mlp_norm": "mlp_norm",
            "down": "mlp.Wo",
        },
        outer={
            "embed": "embeddings.tok_embeddings",
            "embed_norm": "embeddings.norm",
            "norm": "final_norm",
        },
        fused={"attn.Wqkv": ("q", "k", "v"), "mlp.Wi": ("gate", "up")},
        parts=("embeddings.", "layers.", "final_norm."),
    ),
}


def of_encoder(spec: DecoderSpec, tensors: Mapping[str, Weight]) -> dict[str, Weight]:
    """Return the tensors of an encoder under the names of a base model, without any head's.

    Rows of positions before that of the first token are left out.
    """
    names = ENCODER_NAMES[spec.architecture]
    embed = f"{names.outer['embed']}.weight"
    prefix = "" if embed in tensors else names.prefix
    inner = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    found = {modern(name): t for name, t in inner.items() if name.startswith(names.parts)}
    positions = f"{names.outer.get('positions')}.weight"
    if positions in found and spec.encoder is not None:
        stop = found[positions].shape[0]
        found[positions] = found[positions].rows(stop - spec.encoder.num_positions, stop)
    return found


def modern(name: str) -> str:
    """Return the name that a norm's weight has today; BERT's first files had TensorFlow's."""
    old = {"gamma": "weight", "beta": "bias"}
    module, _, last = name.rpartition(".")
    return f"{module}.{old.get(last, last)}" if module.endswith("LayerNorm") else name


def encoder(spec: DecoderSpec, _tensors: Mapping[str, Weight]) -> dict[str, WeightSource]:
    """Name the tensors that `of_encoder` returns."""
    names = ENCODER_NAMES[spec.architecture]
    sources = linear_sources("", "", names.outer)
    sizes = dict.fromkeys("qkv", spec.num_heads * spec.head_dim)
    sizes |= dict.fromkeys(("gate", "up"), spec.intermediate_size)
    for i in range(len(spec.layers)):
        ours, theirs = f"layers.{i}.", f"{names.layers}{i}."
        sources |= linear_sources(ours, theirs, names.in_layer)
        for module, parts in names.fused.items():
            first = 0
            for part in parts:
                for suffix, end in (("", ".weight"), (".bias", ".bias")):
                    sources[f"{ours}{part}{suffix}"] = WeightSource(f"{theirs}{module}{end}", first)
                first += sizes[part]
    return sources


def linear_sources(ours: str, theirs: str, modules: Mapping[str, str]) -> dict[str, WeightSource]:
    """Name the weight and the bias of modules."""
    return {
        f"{ours}{name}{suffix}": WeightSource(f"{theirs}{module}{end}")
        for name, module in modules.items()
        for suffix, end in (("", ".weight"), (".bias", ".bias"))
    }
