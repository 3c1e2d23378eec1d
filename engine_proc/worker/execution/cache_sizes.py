"""Sizes of pages and states, as the C++ core has them."""

from headrace.engine_proc.shm.cache_memory import SYSTEM_PAGE
from headrace.engine_proc.worker.execution.cpu_executor import KVDtype
from headrace.engine_proc.worker.execution.held_matrices import LANES
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec


def page_bytes(spec: DecoderSpec, page_tokens: int, kv_dtype: KVDtype) -> int:
    """Return the bytes of a KV page over all layers. Values are padded to 16 a head.

    A latent is stored once. Where layers draft from hidden states, these lie there, too.
    """
    itemsize = 4 if kv_dtype == KVDtype.FLOAT32 else 2
    layers = [layer for layer in spec.layers if layer.has_pages]
    if spec.encoder is not None:  # its layers share one's pages
        layers = layers[:1]
    numbers = 0
    for layer in layers:
        num_kv_heads, head_dim = spec.kv_heads_of(layer)
        key_dim = head_dim if spec.latent is None else 0
        numbers += num_kv_heads * (key_dim + -(-head_dim // LANES) * LANES)
    if spec.num_mtp_layers:
        numbers += spec.hidden_size
    return page_tokens * numbers * itemsize


def state_bytes(spec: DecoderSpec) -> int:
    """Return the bytes of a state slot."""
    return 4 * spec.state_numbers


def cache_bytes(
    spec: DecoderSpec, num_pages: int, num_states: int, page_tokens: int, kv_dtype: KVDtype
) -> int:
    """Return the bytes of all pages, and of all states behind them, in whole pages of the system.

    A vector load may run a page of the system's past the end.
    """
    parts = num_pages * page_bytes(spec, page_tokens, kv_dtype), num_states * state_bytes(spec)
    return SYSTEM_PAGE + sum(-(-part // SYSTEM_PAGE) * SYSTEM_PAGE for part in parts)
