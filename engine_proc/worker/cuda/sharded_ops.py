"""Tensor-parallel operations of workers on GPUs; `shard.py` cuts the weights.

No operation reads a value on the host, and shapes depend on shapes only, so CUDA graphs can capture
them.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.engine_proc.collectives.collectives import Collectives
from headrace.engine_proc.worker.cuda.kernels.norm import square_sums
from headrace.engine_proc.worker.cuda.kernels.numerics import Scaling
from headrace.engine_proc.worker.cuda.mixers.gated_norm import CutNorms
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec, Mamba2Spec
from headrace.engine_proc.worker.parallel.peers import Peers
from headrace.engine_proc.worker.parallel.shard import cuts_norms

PADDED_TOKENS = 8  # logits of each worker are a multiple: 16 bytes, which our kernels gather


class ShardedOps:
    """The workers of a model, seen from one of them.

    Args:
        spec: of the whole model.
        peers: None is a worker with the whole model.
    """

    def __init__(self, spec: DecoderSpec, peers: Peers[Collectives[Tensor]] | None) -> None:
        self.peers = peers
        self.num_tokens = spec.vocab_size
        self.per_layer = spec.per_layer
        self.mlp_sizes = [spec.mlp_size_of(layer) for layer in spec.layers]
        self.num_numbers = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over all workers; it may be in `x`."""
        return x if self.peers is None else self.peers.group.all_reduce(x)

    def check(self) -> None:
        """Raise `CollectiveFailed` if another worker is gone. Results are undefined before this
        call.

        What is checked is what the device has done, so the host waits for that first.
        """
        if self.peers is not None:
            self.peers.group.check()

    def embed(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """Return the embeddings of tokens, [tokens, hidden_size]: each has one worker's row.

        Args:
            weight: our own rows.
        """
        if self.peers is None:
            return F.embedding(token_ids, weight)
        if len(weight) == 0:
            return self.sum(weight.new_zeros(len(token_ids), weight.shape[1]))
        row = token_ids - self.peers.shard.tokens.start
        is_foreign = (row < 0) | (row >= len(weight))
        x = F.embedding(row.masked_fill(is_foreign, 0), weight)
        return self.sum(x.masked_fill(is_foreign[:, None], 0))

    def embed_for_layers(
        self, token_ids: Tensor, weight: Tensor | None, images: Tensor | None
    ) -> Tensor | None:
        """Return the embeddings of tokens for all layers, [tokens, layers * size], or None.

        Args:
            weight: our own rows; tokens beyond all of them have those of token 0.
            images: the tokens that come in as rows of images, which have those of token 0, too.
        """
        if self.per_layer is None or weight is None:
            return None
        ids = token_ids.masked_fill(token_ids >= self.per_layer.vocab_size, 0)
        if images is not None:
            ids[images] = 0
        return self.embed(ids, weight)

    def all_logits(self, own: Tensor, out: Tensor) -> Tensor:
        """Write the logits of all tokens, [rows, vocab_size]; return them.

        Args:
            own: of our own tokens, [rows, tokens].
        """
        if self.peers is None:
            return out.copy_(own)
        if len(own) == 0:
            return out
        counts = [len(shard.tokens) for shard in self.peers.shards]
        width = -(-max(counts) // PADDED_TOKENS) * PADDED_TOKENS
        if own.shape[1] < width:
            own = F.pad(own, (0, width - own.shape[1]))
        gathered = own.new_empty(len(counts), *own.shape)
        self.peers.group.all_gather(own, gathered)
        if min(counts) == width:
            out.view(len(own), len(counts), width).copy_(gathered.transpose(0, 1))
            return out
        parts = zip(gathered, counts, strict=True)
        return out.copy_(torch.cat([part[:, :count] for part, count in parts], 1))

    def norm_heads(
        self, q: Tensor, k: Tensor, weights: tuple[Tensor, Tensor], scaling: Scaling, eps: float
    ) -> None:
        """Norm queries and keys over all heads of all workers, in place.

        Args:
            q, k: those of our own heads, [tokens, heads * head_dim].
            weights: likewise.
        """
        assert self.peers is not None
        assert scaling not in (Scaling.LAYER, Scaling.LAYER_ONE_PLUS)
        of_keys = square_sums(k) * self.peers.shard.owns_keys
        squares = self.sum(torch.stack([square_sums(q), of_keys], 1))
        for index, (x, weight) in enumerate(zip((q, k), weights, strict=True)):
            scale = torch.rsqrt(squares[:, index] / self.num_numbers[index] + eps)
            factors = weight + 1 if scaling == Scaling.RMS_ONE_PLUS else weight
            x.copy_(x.float() * scale[:, None] * factors)

    def cut_norms(self, layer: int, mamba2: Mamba2Spec) -> CutNorms | None:
        """Return the norms of a layer that have heads of several workers; None is whole norms.

        Args:
            mamba2: the layer's, with our own heads.
        """
        if self.peers is None:
            return None
        if not cuts_norms(mamba2, [shard.mamba2_heads[layer] for shard in self.peers.shards]):
            return None
        num_groups = mamba2.num_heads * mamba2.head_dim // mamba2.norm_size
        return CutNorms(mamba2.heads.start * mamba2.head_dim, num_groups, self.sum)
