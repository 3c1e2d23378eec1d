"""The families of encoders: BERT and its kin, and ModernBERT."""

from collections.abc import Callable
from typing import Any

from headrace.engine_proc.worker.models.families.dense import (
    ACTIVATIONS,
    layer_types,
    ropes_by_type,
    split_head_dim,
)
from headrace.engine_proc.worker.models.specs.config_fields import ConfigFields
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    DecoderSpec,
    EncoderSpec,
    LayerSpec,
    Norm,
    NormPlacement,
    RopeTable,
)
from headrace.engine_proc.worker.models.specs.rope import rope_table

BERT_ACTIVATIONS = {name: ACTIVATIONS[name] for name in ("gelu", "gelu_new", "gelu_pytorch_tanh")}
# Fields that change no vector of a text: of training, of heads, and of what uses the vectors.
INERT = (
    "attention_probs_dropout_prob",
    "classifier_activation",
    "classifier_bias",
    "classifier_dropout",
    "classifier_pooling",
    "cls_token_id",
    "decoder_bias",
    "deterministic_flash_attn",
    "directionality",
    "dropout",
    "embedding_dropout",
    "finetuning_task",
    "gradient_checkpointing",
    "hidden_dropout_prob",
    "initializer_cutoff_factor",
    "layer_norm_eps",  # of ModernBERT, whose modules read `norm_eps`
    "mlp_dropout",
    "num_labels",
    "output_past",
    "pad_token_id",
    "problem_type",
    "qa_dropout",
    "reference_compile",
    "repad_logits_with_grad",
    "sep_token_id",
    "seq_classif_dropout",
    "sinusoidal_pos_embds",  # the file holds their numbers
    "sparse_pred_ignore_index",
    "sparse_prediction",
    "summary_activation",
    "summary_last_dropout",
    "summary_type",
    "summary_use_proj",
    "tie_word_embeddings",
)
POOLER_FIELDS = (
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
)


def encoder(fields: ConfigFields, encoder: EncoderSpec, **differences: Any) -> DecoderSpec:
    """Lower the fields that all encoders share; `differences` are fields of the spec."""
    fields.read |= {*INERT, *POOLER_FIELDS}
    num_heads = fields.integer("num_attention_heads")
    head_dim = split_head_dim(fields)
    if head_dim * num_heads != fields.integer("hidden_size"):
        raise fields.wrong("num_attention_heads", "a divisor of 'hidden_size'")
    shared: dict[str, Any] = {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "max_position": encoder.num_positions,
        "norm": Norm.LAYER,
        "ropes": (),
    }
    return DecoderSpec(
        architecture=fields.text("model_type"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        encoder=encoder,
        **shared | differences,
    )


def bert_like(fields: ConfigFields, num_positions: int, act: str, eps: float) -> DecoderSpec:
    """Lower what follows BERT: norms behind the sums, and learned positions."""
    num_types = 0 if "dim" in fields.values else fields.integer("type_vocab_size", 2)
    return encoder(
        fields,
        EncoderSpec(
            num_positions=num_positions,
            num_token_types=num_types,
            embed_norm=True,
            last_norm=False,
        ),
        layers=(LayerSpec(rope=None),) * fields.integer("num_hidden_layers"),
        activation=fields.choice(act, BERT_ACTIVATIONS, "gelu"),
        placement=NormPlacement.POST_SUM,
        norm_bias=True,
        norm_eps=eps,
        gated_mlp=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )


def bert(fields: ConfigFields, first_position: int = 0) -> DecoderSpec:
    """`first_position`: rows of the positions' matrix before that of the first token."""
    fields.choice("position_embedding_type", {"absolute": None}, "absolute")
    num_positions = fields.integer("max_position_embeddings") - first_position
    return bert_like(fields, num_positions, "hidden_act", fields.number("layer_norm_eps", 1e-12))


def roberta(fields: ConfigFields) -> DecoderSpec:
    """Positions are counted from the padding token's id + 1 on."""
    return bert(fields, fields.get("pad_token_id", 1) + 1)


def electra(fields: ConfigFields) -> DecoderSpec:
    """Without a projection of embeddings."""
    size = fields.integer("hidden_size")
    if fields.integer("embedding_size", 128) != size:
        raise fields.wrong("embedding_size", f"the hidden_size {size}")
    return bert(fields)


def distilbert(fields: ConfigFields) -> DecoderSpec:
    """BERT without token types, and with names of its own."""
    names = {
        "hidden_size": "dim",
        "intermediate_size": "hidden_dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    }
    renamed = {ours: fields.get(theirs) for ours, theirs in names.items()}
    own = ConfigFields({**fields.values, **renamed}, fields.owner, names)
    spec = bert_like(own, own.integer("max_position_embeddings"), "activation", 1e-12)
    fields.read |= own.read
    return spec


def modernbert(fields: ConfigFields) -> DecoderSpec:
    """`local_attention` counts the tokens of a local layer's window on both sides together."""
    every = fields.integer("global_attn_every_n_layers", 3)
    slides = layer_types(fields, lambda i: i % every != 0)
    size = fields.integer("local_attention", 128) // 2 + 1
    return encoder(
        fields,
        EncoderSpec(embed_norm=True, first_norm=False),
        max_position=fields.integer("max_position_embeddings"),
        layers=tuple(
            LayerSpec(rope=1, window=size) if slide else LayerSpec(rope=0) for slide in slides
        ),
        ropes=modernbert_ropes(fields),
        activation=fields.choice("hidden_activation", BERT_ACTIVATIONS, "gelu"),
        norm_bias=fields.flag("norm_bias", False),
        norm_eps=fields.number("norm_eps", 1e-5),
        qkv_bias=fields.flag("attention_bias", False),
        output_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def modernbert_ropes(fields: ConfigFields) -> tuple[RopeTable, ...]:
    """Lower the RoPE of global layers and of local ones."""
    thetas = (
        fields.number("global_rope_theta", 160_000.0),
        fields.number("local_rope_theta", 10_000.0),
    )
    if "rope_parameters" in fields.values:
        return ropes_by_type(fields, head_dim=split_head_dim(fields), thetas=thetas)
    return tuple(
        rope_table(
            {},
            owner=fields.owner,
            head_dim=split_head_dim(fields),
            max_position=fields.integer("max_position_embeddings"),
            theta=theta,
        )
        for theta in thetas
    )


ENCODERS: dict[str, Callable[[ConfigFields], DecoderSpec]] = {
    "bert": bert,
    "camembert": roberta,
    "distilbert": distilbert,
    "electra": electra,
    "modernbert": modernbert,
    "roberta": roberta,
    "xlm-roberta": roberta,
}
