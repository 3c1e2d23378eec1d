"""What families call their parts in Hugging Face folders, where that is not as Llama does."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class FolderNames:
    """The names of modules. Those of a base model have no `prefix`."""

    prefix: str = "model."
    embed: str = "embed_tokens"
    norm: str = "norm"
    head: str = "lm_head"
    in_layer: Mapping[str, str] = field(default_factory=dict)  # by our names
    tensors: Mapping[str, str] = field(default_factory=dict)  # in a layer, that are no modules
    # The module of queries, keys and values, whose rows are those of head after head.
    qkv_by_head: str = ""


LLAMA = FolderNames()
FOLDER_NAMES = {
    "starcoder2": FolderNames(in_layer={"up": "mlp.c_fc", "down": "mlp.c_proj"}),
    "gpt_neox": FolderNames(
        prefix="gpt_neox.",
        embed="embed_in",
        norm="final_layer_norm",
        head="embed_out",
        in_layer={
            "o": "attention.dense",
            "up": "mlp.dense_h_to_4h",
            "down": "mlp.dense_4h_to_h",
        },
        qkv_by_head="attention.query_key_value",
    ),
    "apertus": FolderNames(
        in_layer={"attn_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"},
        tensors={
            f"xielu.{name}": f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")
        },
    ),
    "phi": FolderNames(
        norm="final_layernorm",
        in_layer={"o": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2"},
    ),
}
