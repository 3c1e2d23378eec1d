"""The pages of a decoder: keys and values of every layer that has some, or latents.

A page has room in every such layer. Layers whose heads have the same sizes are one tensor. A layer
that reads the keys of another has those.
"""

import torch
from torch import Tensor

from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec, LayerSpec

HeadSizes = tuple[int, int]  # how many KV heads, and the numbers of each


class KvPages:
    """Empty pages.

    Attributes:
        groups: [layers, keys and values, pages, page_tokens, kv_heads, head_dim] of each size of
            heads; latents have one in place of two.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        num_pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        planes = 2 if spec.latent is None else 1
        places: dict[HeadSizes, list[int]] = {}
        for index, layer in enumerate(spec.layers):
            if layer.has_pages:
                places.setdefault(spec.kv_heads_of(layer), []).append(index)
        self.groups = tuple(
            torch.zeros(
                len(indices), planes, num_pages, page_tokens, *sizes, device=device, dtype=dtype
            )
            for sizes, indices in places.items()
        )
        own = {
            index: group[place]
            for group, indices in zip(self.groups, places.values(), strict=True)
            for place, index in enumerate(indices)
        }
        self._of_layers = [own.get(owner_of(index, one)) for index, one in enumerate(spec.layers)]
        self._num_pages = num_pages

    @property
    def page_bytes(self) -> int:
        """Size of a page over all layers, bytes."""
        return sum(group.nbytes for group in self.groups) // self._num_pages

    def of_layer(self, index: int) -> Tensor:
        """Return what a layer reads: [2, pages, page_tokens, kv_heads, head_dim]; 1 of latents."""
        pages = self._of_layers[index]
        assert pages is not None
        return pages


def owner_of(index: int, layer: LayerSpec) -> int:
    """Return the layer that computes the keys and values that a layer reads."""
    return index if layer.keys_of is None else layer.keys_of
