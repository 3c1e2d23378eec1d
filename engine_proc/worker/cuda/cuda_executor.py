"""Runs a `DecoderSpec` with Triton kernels, on a GPU; in Triton's interpreter, on the CPU.

Every kernel sums a row in a fixed order, so the logits of a token have the same bits with any batch
mates.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from headrace.engine_proc.collectives.collectives import Collectives
from headrace.engine_proc.worker.checkpoints.weights import Weights
from headrace.engine_proc.worker.cuda.attention.kv_pages import HeadSizes, KvPages, owner_of
from headrace.engine_proc.worker.cuda.attention.latent_attention import (
    latent_scheduler,
    latent_tiling,
)
from headrace.engine_proc.worker.cuda.attention.paged_attention import (
    attend,
    scheduler_of,
    tiling_of,
)
from headrace.engine_proc.worker.cuda.attention.tile_schedule import (
    Stretches,
    TileScheduler,
    Tiling,
)
from headrace.engine_proc.worker.cuda.flashinfer_attention import FlashInferAttention, is_for
from headrace.engine_proc.worker.cuda.graph_sizes import Buckets, Sizes
from headrace.engine_proc.worker.cuda.graphs import Graph, GraphMaker, Run, capture_all
from headrace.engine_proc.worker.cuda.kernels.e4m3_rows import E4M3
from headrace.engine_proc.worker.cuda.kernels.norm import add_norm, norm
from headrace.engine_proc.worker.cuda.kernels.numerics import INTERPRETED, Scaling
from headrace.engine_proc.worker.cuda.kernels.rope_kv_store import (
    HeadNorm,
    rope_store,
    rotations_at,
    temperatures_at,
)
from headrace.engine_proc.worker.cuda.latent_layer import attend_to_latents
from headrace.engine_proc.worker.cuda.matrices.adapted import (
    AdapterRoom,
    PartFactors,
    RowSlots,
    adapt,
)
from headrace.engine_proc.worker.cuda.matrices.matrices import (
    OF_EACH_HEAD,
    load_weights,
)
from headrace.engine_proc.worker.cuda.mixers.gated_delta_net import run_gated_delta_net
from headrace.engine_proc.worker.cuda.mixers.gated_norm import GateOrder, gated_norm
from headrace.engine_proc.worker.cuda.mixers.mamba import run_mamba
from headrace.engine_proc.worker.cuda.mixers.mamba2 import run_mamba2
from headrace.engine_proc.worker.cuda.mixers.short_conv import run_short_conv
from headrace.engine_proc.worker.cuda.mixers.token_blocks import slot_numbers
from headrace.engine_proc.worker.cuda.mixtures.expert_tiles import tiles_of_heads
from headrace.engine_proc.worker.cuda.mlp import run_feed_forward
from headrace.engine_proc.worker.cuda.residuals.around_layers import AroundLayers, has_more
from headrace.engine_proc.worker.cuda.row_draws import DrawSize, RowDraws
from headrace.engine_proc.worker.cuda.sharded_ops import ShardedOps
from headrace.engine_proc.worker.cuda.step_buffers import StepBuffers
from headrace.engine_proc.worker.cuda.step_inputs import (
    ROPE_PARTS,
    STATE_PARTS,
    DeviceStep,
    ImageInputs,
    image_inputs,
    prepare_inputs,
    prepare_moves,
)
from headrace.engine_proc.worker.execution.executor import Batch, Floats
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    DecoderSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    MambaSpec,
    Mixer,
    NormPlacement,
    QKNorm,
    ShortConvSpec,
)
from headrace.engine_proc.worker.parallel.peers import Peers

PARALLEL = (NormPlacement.PARALLEL, NormPlacement.PARALLEL_TWO_NORMS)
LARGEST = Sizes(num_tokens=512, num_sequences=64, num_rows=64)


class CudaExecutor:
    """An `Executor`. Matrices, activations and pages are of `dtype`, sums and norms are fp32.

    Args:
        num_states: slots for the states of sequences, in decoders that have some.
        device: "cpu" where kernels run in Triton's interpreter.
        quantization: "fp8" rounds the matrices of layers, and what meets them, to 8-bit floats.
        kv_dtype: of pages; None is `dtype`. Rounded to e4m3, what is too large becomes 448.
        kv_scales: of each layer's keys and values in e4m3 pages; none are 1.
        largest: no step is larger; more rows than these have logits, but not in graphs.
        max_model_len: tokens of a sequence; default: the spec's.
        tiling: of attention; other tilings give other bits.
        progress: called with (weights loaded, weights in all) while loading.
        adapters: room for these; None takes none.
        peers: the workers that run the other shares of `spec` and `weights`, which are the whole
            model's. All run the same steps in the same order; each returns the same.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        *,
        num_pages: int,
        num_states: int = 0,
        page_tokens: int = 32,
        device: torch.device | str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        quantization: str = "none",
        kv_dtype: torch.dtype | None = None,
        kv_scales: Sequence[tuple[float, float]] = (),
        tiling: Tiling | None = None,
        largest: Sizes = LARGEST,
        max_model_len: int | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        adapters: AdapterRoom | None = None,
        peers: Peers[Collectives[Tensor]] | None = None,
    ) -> None:
        self.shard_group = ShardedOps(spec, peers)
        if peers is not None:
            spec, weights = peers.share_of(spec, weights)
        self.spec = spec
        num_layers = len(spec.layers)
        self.page_tokens = page_tokens
        self.device = torch.device(device)
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        is_scaled = self.kv_dtype == E4M3 and len(kv_scales) > 0
        self.kv_scales = kv_scales if is_scaled else [(1.0, 1.0)] * num_layers
        self.tilings = {
            sizes: tiling or self.tiling_of(sizes)
            for sizes in {spec.kv_heads_of(layer) for layer in spec.layers if layer.has_mixer}
        }
        assert (self.device.type == "cpu") == bool(INTERPRETED.value), "is TRITON_INTERPRET set?"
        self.scaling = Scaling.of(spec.norm)
        self.unweighted = torch.ones(2, spec.head_dim, device=self.device)
        self.loaded = load_weights(
            spec,
            weights,
            device=self.device,
            dtype=dtype,
            quantization=quantization,
            progress=progress,
        )
        self.row_slots: RowSlots | None = None
        self.adapter_parts: dict[str, PartFactors] = {}  # by the weight's name
        if adapters is not None:
            self.make_room(adapters)
        self.matrices, self.weights = self.loaded.matrices, self.loaded.tensors
        self.inv_freqs = [torch.tensor(rope.inv_freq, device=self.device) for rope in spec.ropes]
        self.axes = [
            torch.tensor(rope.axes, device=self.device) if rope.axes else None
            for rope in spec.ropes
        ]
        self.take_cache(num_pages, num_states)
        self.multiplier = torch.tensor(spec.embedding_multiplier, dtype=dtype)
        max_model_len = max_model_len or spec.max_position
        self.schedulers = {
            sizes: self.scheduler_for(sizes, largest.num_tokens, max_model_len)
            for sizes in self.tilings
        }
        self.buffers = StepBuffers(
            largest,
            page_tokens=page_tokens,
            max_pages=-(-max_model_len // page_tokens),
            vocab_size=self.shard_group.num_tokens,
            device=self.device,
            rope_parts=ROPE_PARTS if any(rope.axes for rope in spec.ropes) else 0,
            state_parts=STATE_PARTS if spec.state_numbers else 0,
        )
        self.draws = RowDraws(self.buffers)
        self.buckets, self.graphs = Buckets(()), dict[Sizes, Graph]()
        self.prompts: FlashInferAttention | None = None  # attends where there are many

    def make_room(self, room: AdapterRoom) -> None:
        """Have room for adapters, which are read from `adapter_parts` by each step."""
        none = torch.empty(0, dtype=torch.int32, device=self.device)
        self.row_slots = RowSlots(none, none)
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        matrices, self.adapter_parts = adapt(
            self.spec, self.loaded.matrices, room, like, self.row_slots
        )
        self.loaded = replace(self.loaded, matrices=matrices)

    def tiling_of(self, sizes: HeadSizes) -> Tiling:
        """Return how attention is tiled in layers with KV heads of these sizes."""
        if self.spec.latent is not None:
            return latent_tiling(self.device)
        return tiling_of(sizes[1], self.dtype, self.device)

    def scheduler_for(self, sizes: HeadSizes, num_tokens: int, max_keys: int) -> TileScheduler:
        """Return what schedules attention in steps of at most so many tokens and keys."""
        spec, tiling = self.spec, self.tilings[sizes]
        most = num_tokens, max_keys, self.device
        if spec.latent is not None:
            return latent_scheduler(tiling, spec.num_heads, spec.latent.rank, *most)
        num_kv_heads, head_dim = sizes
        return scheduler_of(tiling, spec.num_heads, num_kv_heads, head_dim, *most)

    def take_cache(self, num_pages: int, num_states: int = 0) -> None:
        """Have so many empty pages and states from here on. Graphs know those before."""
        spec = self.spec
        self.kv = KvPages(replace(spec, layers=()), 1, 1, self.kv_dtype, self.device)
        self.states = torch.empty(0)  # what was there is free first, ...
        self.layer_states: tuple[Tensor, ...] = ()  # ... and these are views of it
        self.kv = KvPages(spec, num_pages, self.page_tokens, self.kv_dtype, self.device)
        sizes = [slot_numbers(layer.mixer, self.dtype) for layer in spec.layers]
        self.states = torch.zeros(num_states, sum(sizes), device=self.device)
        self.layer_states = self.states.split_with_sizes(sizes, 1)

    @property
    def page_bytes(self) -> int:
        """Size of a page over all layers, bytes."""
        return self.kv.page_bytes

    @property
    def state_bytes(self) -> int:
        """Size of a sequence's state over all layers, bytes."""
        return self.states.shape[1] * self.states.itemsize

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Floats:
        """Write the batch's keys and values; return the logits of its rows, [rows, vocab_size]."""
        logits = self.logits(batch).to("cpu", copy=True).numpy()
        self.shard_group.check()
        return logits

    @torch.inference_mode()
    def embed(self, batch: Batch) -> Floats:
        """Do as `forward`, but return what the head would see, [rows, hidden_size]."""
        sizes = self.buffers.send(batch)
        images = self.images_of(batch)
        prompts = self.planned(batch, sizes)
        step = self.step_of(sizes, images, prompts)
        vectors = self.hidden(step).float().cpu().numpy()
        self.shard_group.check()
        return vectors

    @torch.inference_mode()
    def logits(self, batch: Batch) -> Tensor:
        """Do as `forward`, and leave the logits on the device, fp32, until the next step."""
        sizes = self.buffers.send(batch)
        images = self.images_of(batch)
        bucket = self.buckets.choose(sizes) if images is None else None
        if bucket is None:
            prompts = self.planned(batch, sizes)
            return self.compute(sizes, images, prompts)
        self.graphs[bucket].replay()
        return self.buffers.logits[: sizes.num_rows]

    def images_of(self, batch: Batch) -> ImageInputs | None:
        """Send what a batch has of images to the device."""
        return image_inputs(batch, self.device, self.dtype, 1 + self.spec.deepstack)

    def planned(self, batch: Batch, sizes: Sizes) -> FlashInferAttention | None:
        """Return what attends in our kernel's place in a step without a graph, ready for it."""
        if self.prompts is None or batch.last_seen is not None or not is_for(sizes):
            return None
        self.prompts.plan(batch)
        return self.prompts

    def compute(
        self,
        sizes: Sizes,
        images: ImageInputs | None = None,
        prompts: FlashInferAttention | None = None,
    ) -> Tensor:
        """Run the step in the buffers, padded to `sizes`."""
        spec = self.spec
        step = self.step_of(sizes, images, prompts)
        own = self.matrices["head"].apply(self.hidden(step))
        logits = self.shard_group.all_logits(own, self.buffers.logits_of(sizes.num_rows))
        if spec.logit_multiplier != 1:
            logits *= spec.logit_multiplier
        if spec.logit_softcap is not None:
            logits.div_(spec.logit_softcap).tanh_().mul_(spec.logit_softcap)
        return logits

    def runs(self, buckets: Buckets) -> dict[Sizes, Run]:
        """Return the steps to capture as graphs, the largest first."""
        return {sizes: partial(self.compute, sizes) for sizes in buckets}

    @torch.inference_mode()
    def capture(
        self,
        buckets: Buckets,
        open_maker: Callable[[], GraphMaker],
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Capture graphs for these sizes of steps, and of draws from them. See `capture_all`."""
        self.buffers.clear()
        draws = self.draws.runs({sizes.num_rows for sizes in buckets})
        runs: dict[Sizes | DrawSize, Run] = dict([*self.runs(buckets).items(), *draws.items()])
        graphs = capture_all(open_maker, runs, around, progress)
        self.graphs = {sizes: graphs[sizes] for sizes in buckets}
        self.draws.take({size: graphs[size] for size in draws})
        self.buckets = buckets

    def step_of(
        self,
        sizes: Sizes,
        images: ImageInputs | None = None,
        prompts: FlashInferAttention | None = None,
    ) -> DeviceStep:
        """Derive all that kernels need to know of the step in the buffers."""
        buffers = self.buffers
        inputs = prepare_inputs(
            buffers.packed,
            buffers.drawn,
            sizes,
            buffers.max_pages,
            self.page_tokens,
            buffers.rope_parts,
        )
        if self.row_slots is not None:
            self.row_slots.tokens = inputs.adapters
            self.row_slots.logit_rows = inputs.adapters.index_select(0, inputs.logit_rows)
        stretches = Stretches(
            query_starts=inputs.query_starts,
            num_keys=inputs.num_keys,
            page_table=inputs.page_table,
        )
        schedules = {
            (heads, window, is_chunked): self.schedulers[heads].schedule(
                stretches, sizes.num_tokens, window, is_chunked
            )
            for heads, window, is_chunked in {
                (self.spec.kv_heads_of(layer), layer.window, layer.is_chunked)
                for layer in self.spec.layers
                if layer.has_pages or layer.attends
            }
        }
        positions = inputs.rope_positions if buffers.rope_parts else inputs.positions[:, None]
        rotations = rotations_at(self.spec.ropes, self.inv_freqs, self.axes, positions)
        heads = None
        if self.spec.latent is not None:
            heads = tiles_of_heads(sizes.num_tokens, self.spec.num_heads, self.dtype, self.device)
        moves = None
        if self.spec.state_numbers:
            moves = prepare_moves(buffers.packed, inputs, sizes, buffers.rope_parts)
        tuned = {layer.temperature for layer in self.spec.layers if layer.temperature is not None}
        return DeviceStep(
            inputs.token_ids,
            inputs.kv_rows,
            stretches,
            schedules,
            inputs.logit_rows,
            rotations,
            {own: temperatures_at(inputs.positions, own) for own in tuned},
            images=images,
            prompts=prompts,
            heads=heads,
            moves=moves,
        )

    def hidden(self, step: DeviceStep) -> Tensor:
        """Run all layers and the last norm, [rows, hidden_size]."""
        x = self.shard_group.embed(step.token_ids, self.weights["embed"])
        if self.spec.embedding_multiplier != 1:
            x = x * self.multiplier
        images = None if step.images is None else step.images.rows
        if images is not None:
            x[images.tokens] = images.parts[0]
        rows = step.logit_rows
        if has_more(self.spec):
            around = self.around_layers(x, step)
            for index, layer in enumerate(self.spec.layers):
                x = self.layer_within(index, layer, x, step, around)
            return self.norm("norm", around.end(x, rows))
        added: Tensor | None = None
        for index, layer in enumerate(self.spec.layers):
            x, added = self.layer(index, layer, x, added, step)
            if images is not None and index < self.spec.deepstack:
                x[images.tokens] += images.parts[index + 1]
        added = None if added is None else added.index_select(0, rows)
        return self.norm_sum("norm", x.index_select(0, rows), added)

    def around_layers(self, x: Tensor, step: DeviceStep) -> AroundLayers:
        """Begin what is around the layers of Gemma 3n and 4."""
        rows = None if step.images is None else step.images.rows
        weight, tokens = self.weights.get("per_layer.embed"), None if rows is None else rows.tokens
        embeds = self.shard_group.embed_for_layers(step.token_ids, weight, tokens)
        return AroundLayers(self.spec, self.loaded, self.scaling, x, embeds)

    def layer_within(
        self, index: int, layer: LayerSpec, x: Tensor, step: DeviceStep, around: AroundLayers
    ) -> Tensor:
        """Run a layer that has more around it, [tokens, hidden] -> the same."""
        name = f"layers.{index}"
        x = around.enter(index, x)
        normed = self.norm(f"{name}.attn_norm", x)
        around.add_attended(index, self.mix(index, layer, normed, step), normed, x)
        around.leave(index, self.mlp(index, self.norm(f"{name}.mlp_norm", x), x, step), x)
        return x

    def layer(
        self, index: int, layer: LayerSpec, x: Tensor, added: Tensor | None, step: DeviceStep
    ) -> tuple[Tensor, Tensor | None]:
        """Run one layer, [tokens, hidden] -> [tokens, hidden], in place where that is quicker.

        Args:
            added: what is still to be added to `x`, by the norm that comes next; and so returned.
        """
        name = f"layers.{index}"
        placement, multiplier = self.spec.placement, self.spec.residual_multiplier
        before = placement != NormPlacement.POST
        if not layer.has_mixer:
            return x, self.mlp(index, self.norm_sum(f"{name}.mlp_norm", x, added), x, step)
        normed = self.norm_sum(f"{name}.attn_norm", x, added) if before else x
        attended = self.mix(index, layer, normed, step)
        if placement in PARALLEL:
            if placement == NormPlacement.PARALLEL_TWO_NORMS:
                normed = self.norm(f"{name}.mlp_norm", x)
            out = self.mlp(index, normed, x, step)
            return x + attended * multiplier + out * multiplier, None
        after = placement in (NormPlacement.POST, NormPlacement.PRE_POST)
        if after:
            attended = self.norm(f"{name}.attn_post_norm", attended)
        if not layer.has_mlp:
            return (x, attended) if before else (x + attended * multiplier, None)
        if before:
            normed = self.norm_sum(f"{name}.mlp_norm", x, attended)
        else:
            x = normed = x + attended * multiplier
        out = self.mlp(index, normed, x, step)
        if after:
            out = self.norm(f"{name}.mlp_post_norm", out)
        return (x, out) if before else (x + out * multiplier, None)

    def mix(self, index: int, layer: LayerSpec, x: Tensor, step: DeviceStep) -> Tensor:
        """Run a layer's mixer, or attention, or add both, [tokens, hidden] -> the same."""
        mixer = layer.mixer
        if mixer is None or isinstance(mixer, LatentAttentionSpec):
            own = self.attention(index, layer, x, step)
        else:
            own = self.move_states(index, mixer, x, step)
        if layer.attention_beside:
            attended = self.attention(index, layer, x, step)
            own = own * layer.mixer_multiplier + attended * layer.attention_multiplier
        return self.shard_group.sum(own)

    def move_states(self, index: int, mixer: Mixer, x: Tensor, step: DeviceStep) -> Tensor:
        """Run a mixer whose sequences have states: our share of [tokens, hidden]."""
        name, eps = f"layers.{index}", self.spec.norm_eps
        assert step.moves is not None
        moved = x, self.layer_states[index], step.moves
        match mixer:
            case ShortConvSpec():
                return run_short_conv(self.loaded, name, *moved)
            case GatedDeltaNetSpec():
                return run_gated_delta_net(self.loaded, name, mixer, eps, *moved)
            case Mamba2Spec():
                cut = self.shard_group.cut_norms(index, mixer)
                return run_mamba2(self.loaded, name, mixer, eps, *moved, cut)
            case MambaSpec():
                return run_mamba(self.loaded, name, mixer, eps, *moved, self.shard_group.sum)
        raise AssertionError(f"no kernel runs {mixer}")

    def attention(self, index: int, layer: LayerSpec, x: Tensor, step: DeviceStep) -> Tensor:
        """Write what pages hold of the tokens, then attend to it: our share of [tokens, hidden]."""
        if isinstance(layer.mixer, LatentAttentionSpec):
            tiling = self.tilings[self.spec.kv_heads_of(layer)]
            stored = self.kv.of_layer(index)[0], self.kv_scales[index][0], tiling
            attended = attend_to_latents(
                self.loaded, f"layers.{index}", self.spec, layer, x, step, *stored
            )
        else:
            attended = self.attend_to_keys(index, layer, x, step)
        attended = attended.flatten(1)
        if self.spec.attention_gate:
            gate = self.matrices[f"layers.{index}.attn_gate"].apply(x)
            size = self.spec.kv_heads_of(layer)[1]
            order = GateOrder.NO_NORM
            attended = gated_norm(attended, gate, None, order, group_size=size, is_sigmoid=True)
        return self.matrices[f"layers.{index}.o"].apply(attended)

    def attend_to_keys(self, index: int, layer: LayerSpec, x: Tensor, step: DeviceStep) -> Tensor:
        """Write keys and values, and attend to them, [tokens, heads, head_dim]."""
        spec, name = self.spec, f"layers.{index}"
        heads, kv_scales = spec.kv_heads_of(layer), self.kv_scales[owner_of(index, layer)]
        keys, values = self.kv.of_layer(index)
        qkv = self.matrices[f"{name}.qkv"].apply(x)
        if layer.owns_keys and not layer.has_values:
            qkv = torch.cat([qkv, qkv[:, -heads[0] * heads[1] :]], 1)
        if spec.qk_norm == QKNorm.FULL:
            self.norm_heads(name, qkv)
        temperature, images = layer.temperature, step.images
        queries = rope_store(
            qkv,
            keys,
            values,
            step.kv_rows,
            rotations=None if layer.rope is None else step.rotations[layer.rope],
            head_norm=self.head_norm(name, layer),
            clip=spec.qkv_clip,
            query_factors=None if temperature is None else step.query_factors[temperature],
            value_eps=spec.norm_eps if spec.value_norm else None,
            kv_scales=kv_scales,
            stores=layer.owns_keys,
        )
        if step.prompts is not None:
            return step.prompts.attend(queries, keys, values, layer.window)
        return attend(
            queries,
            keys,
            values,
            step.stretches,
            scale=spec.attention_scale,
            window=layer.window,
            is_chunked=layer.is_chunked,
            last_seen=None if images is None or layer.is_causal else images.last_seen,
            softcap=spec.attention_softcap,
            sinks=self.weights.get(f"{name}.sinks"),
            kv_scales=kv_scales,
            tiling=self.tilings[heads],
            schedule=step.schedules[heads, layer.window, layer.is_chunked],
        )

    def head_norm(self, name: str, layer: LayerSpec) -> HeadNorm | None:
        """Return the norm of single heads of queries and keys of a layer, if it has one."""
        kind, eps = self.spec.qk_norm, self.spec.norm_eps
        if kind == QKNorm.UNWEIGHTED_AFTER_ROPE and layer.rope is not None:
            return HeadNorm(Scaling.RMS, self.unweighted, eps, is_after_rope=True)
        if kind not in OF_EACH_HEAD:
            return None
        is_after_rope = kind == QKNorm.PER_HEAD_AFTER_ROPE
        return HeadNorm(self.scaling, self.weights[f"{name}.qk_norm"], eps, is_after_rope)

    def norm_heads(self, name: str, qkv: Tensor) -> None:
        """Norm queries and keys over all heads, in place."""
        spec = self.spec
        num_q, num_k = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        q, k = qkv[:, :num_q], qkv[:, num_q:][:, :num_k]
        if self.shard_group.peers is not None:
            weights = self.weights[f"{name}.q_norm"], self.weights[f"{name}.k_norm"]
            self.shard_group.norm_heads(q, k, weights, self.scaling, spec.norm_eps)
            return
        self.norm(f"{name}.q_norm", q, out=q)
        self.norm(f"{name}.k_norm", k, out=k)

    def mlp(self, index: int, x: Tensor, residual: Tensor, step: DeviceStep) -> Tensor:
        """Run a layer's MLP or mixture, of all workers; see `run_feed_forward`."""
        ops, kv_rows = self.shard_group, step.kv_rows
        return run_feed_forward(self.loaded, index, self.spec, ops, x, residual, kv_rows)

    def norm(self, name: str, x: Tensor, out: Tensor | None = None) -> Tensor:
        weight, bias = self.weights[name], self.weights.get(f"{name}.bias")
        return norm(x, weight, scaling=self.scaling, eps=self.spec.norm_eps, bias=bias, out=out)

    def norm_sum(self, name: str, x: Tensor, added: Tensor | None) -> Tensor:
        """Add to the residual `x`, in place, and return the norm of the sum."""
        if added is None:
            return self.norm(name, x)
        return add_norm(
            added,
            x,
            self.weights[name],
            scaling=self.scaling,
            eps=self.spec.norm_eps,
            bias=self.weights.get(f"{name}.bias"),
            multiplier=self.spec.residual_multiplier,
        )
