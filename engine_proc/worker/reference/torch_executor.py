"""Runs a `DecoderSpec` in plain torch: the reference for every other executor.

Written to be read, and to round as transformers does in fp32. Linear layers see the whole batch;
attention goes from sequence to sequence.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.engine_proc.worker.checkpoints.weights import Weights
from headrace.engine_proc.worker.execution.executor import Batch, Floats
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    Activation,
    DecoderSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    MambaSpec,
    MixtureSpec,
    NormPlacement,
    QKNorm,
    QueryTemperature,
    RopeTable,
    ShortConvSpec,
)
from headrace.engine_proc.worker.models.weight_shapes import XIELU
from headrace.engine_proc.worker.reference.torch_attention import (
    Places,
    Reach,
    attend,
    place,
    to_tensor,
)
from headrace.engine_proc.worker.reference.torch_delta_net import (
    DeltaTokens,
    run_sequence,
)
from headrace.engine_proc.worker.reference.torch_gemma import TorchGemma
from headrace.engine_proc.worker.reference.torch_mamba import run_mamba
from headrace.engine_proc.worker.reference.torch_mamba2 import PARTS, run_mamba2
from headrace.engine_proc.worker.reference.torch_mixture import choose_experts


class TorchExecutor:
    """An `Executor`. Weights, activations and cache are of `dtype`; norms and softmax are fp32."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        *,
        num_pages: int,
        page_tokens: int,
        num_states: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.spec = spec
        self.page_tokens = page_tokens
        self.device = torch.device(device)
        self.dtype = dtype
        self.weights = {
            name: torch.from_numpy(stored.to_float32()).to(self.device, dtype)
            for name, stored in weights.items()
        }
        self.inv_freqs = [torch.tensor(rope.inv_freq, device=self.device) for rope in spec.ropes]
        pages = [(num_pages, page_tokens, *spec.kv_heads_of(layer)) for layer in spec.layers]
        self.kv = [torch.zeros(2, *page, device=self.device, dtype=dtype) for page in pages]
        self.states = {
            i: torch.zeros(num_states, layer.mixer.state_numbers)
            for i, layer in enumerate(spec.layers)
            if layer.mixer is not None and layer.mixer.state_numbers
        }

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Floats:
        """Write the batch's keys and values; return the logits of its rows, [rows, vocab_size]."""
        spec = self.spec
        weight = self.weights["embed" if spec.tied_head else "head"]
        logits = F.linear(self.hidden(batch), weight, self.weights.get("head.bias")).float()
        logits = logits * spec.logit_multiplier
        if spec.logit_softcap is not None:
            logits = torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap
        return logits.cpu().numpy()

    @torch.inference_mode()
    def embed(self, batch: Batch) -> Floats:
        """Do as `forward`, but return what the head would see, [rows, hidden_size]."""
        return self.hidden(batch).float().cpu().numpy()

    def hidden(self, batch: Batch) -> Tensor:
        """Run all layers and the last norm, [rows, hidden_size]."""
        spec = self.spec
        places = place(batch, self.page_tokens, self.device)
        x = F.embedding(to_tensor(batch.token_ids, self.device), self.weights["embed"])
        x = x * torch.tensor(spec.embedding_multiplier, dtype=self.dtype, device=self.device)
        is_row, parts = self.image_parts(batch)
        x[is_row] = parts[0]
        positions = places.positions[:, None].expand(-1, 3)
        if batch.rope_positions is not None:
            positions = to_tensor(batch.rope_positions, self.device)
        rotations = [
            rotation(rope, inv_freq, positions)
            for rope, inv_freq in zip(spec.ropes, self.inv_freqs, strict=True)
        ]
        gemma = TorchGemma(self.spec, self.weights, x, batch.token_ids)
        for index, layer in enumerate(spec.layers):
            x = gemma.enter(index, x)
            x = self.layer(index, layer, x, batch, places, rotations, gemma)
            x = gemma.leave(index, x)
            if index < spec.deepstack:
                x[is_row] += parts[index + 1]
        return self.norm("norm", gemma.end(x)[to_tensor(batch.logit_rows, self.device)])

    def image_parts(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return which tokens come in as rows of images, and the parts of these rows,
        [parts, rows, hidden_size]."""
        num_parts, size = 1 + self.spec.deepstack, self.spec.hidden_size
        if batch.embed_rows is None or batch.embeds is None:
            is_row = torch.zeros(len(batch.token_ids), dtype=torch.bool, device=self.device)
            return is_row, torch.empty(num_parts, 0, size, device=self.device, dtype=self.dtype)
        rows = to_tensor(batch.embed_rows, self.device)
        embeds = torch.from_numpy(batch.embeds).to(self.device, self.dtype)
        return rows >= 0, embeds[rows[rows >= 0]].view(-1, num_parts, size).transpose(0, 1)

    def layer(
        self,
        index: int,
        layer: LayerSpec,
        x: Tensor,
        batch: Batch,
        places: Places,
        rotations: list[tuple[Tensor, Tensor]],
        gemma: TorchGemma,
    ) -> Tensor:
        """Run one layer, [tokens, hidden] -> [tokens, hidden]."""
        name = f"layers.{index}"
        before = self.spec.placement != NormPlacement.POST
        after = self.spec.placement in (NormPlacement.POST, NormPlacement.PRE_POST)
        multiplier = self.spec.residual_multiplier

        if not layer.has_mixer:
            out = self.feed_forward(name, layer, self.norm(f"{name}.mlp_norm", x))
            return x + out * multiplier
        normed = self.norm(f"{name}.attn_norm", x) if before else x
        attended = self.mix(index, layer, normed, batch, places, rotations)
        if self.spec.placement == NormPlacement.PARALLEL_TWO_NORMS:
            normed = self.norm(f"{name}.mlp_norm", x)
        if self.spec.placement in (NormPlacement.PARALLEL, NormPlacement.PARALLEL_TWO_NORMS):
            return x + attended * multiplier + self.feed_forward(name, layer, normed) * multiplier
        if after:
            attended = self.norm(f"{name}.attn_post_norm", attended)
        x = gemma.with_laurel(index, normed, x + attended * multiplier)
        if not layer.has_mlp:
            return x

        if layer.mixture is not None and layer.mixture.own_norms:
            out = self.mixture_beside(name, layer.mixture, x)
        else:
            out = self.feed_forward(name, layer, self.norm(f"{name}.mlp_norm", x) if before else x)
        if after:
            out = self.norm(f"{name}.mlp_post_norm", out)
        return x + out * multiplier

    def mix(
        self,
        index: int,
        layer: LayerSpec,
        x: Tensor,
        batch: Batch,
        places: Places,
        rotations: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Run a layer's mixer, or attention, or add both, [tokens, hidden] -> the same."""
        match layer.mixer:
            case None:
                return self.attention(index, layer, x, places, rotations)
            case ShortConvSpec() as conv:
                return self.short_conv(index, conv, x, batch, places)
            case GatedDeltaNetSpec() as delta:
                return self.delta_net(index, delta, x, batch, places)
            case LatentAttentionSpec() as latent:
                return self.latent_attention(index, layer, latent, x, places, rotations)
            case MambaSpec() as mamba:
                return self.mamba(index, mamba, x, batch, places)
            case Mamba2Spec() as mamba2:
                mixed = self.mamba2(index, mamba2, x, batch, places)
        if not layer.attention_beside:
            return mixed
        attended = self.attention(index, layer, x, places, rotations)
        return mixed * layer.mixer_multiplier + attended * layer.attention_multiplier

    def attention(
        self,
        index: int,
        layer: LayerSpec,
        x: Tensor,
        places: Places,
        rotations: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Write keys and values to the cache, then attend to it, [tokens, hidden] -> the same."""
        spec, name = self.spec, f"layers.{index}"
        q, k, v = self.projected(index, layer, x)
        if spec.qk_norm == QKNorm.PER_HEAD:
            q = self.norm(f"{name}.q_norm", q)
            k = self.norm(f"{name}.k_norm", k) if layer.owns_keys else k
        if layer.rope is not None:
            interleaved = spec.ropes[layer.rope].interleaved
            q = rotate(q, *rotations[layer.rope], interleaved)
            k = rotate(k, *rotations[layer.rope], interleaved)
        if spec.qk_norm == QKNorm.PER_HEAD_AFTER_ROPE:
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        if spec.qk_norm == QKNorm.UNWEIGHTED_AFTER_ROPE and layer.rope is not None:
            q, k = (F.rms_norm(x, x.shape[-1:], eps=spec.norm_eps) for x in (q, k))
        if layer.temperature is not None:
            q = q * temperatures(layer.temperature, places.positions)[:, None, None].to(self.dtype)
        keys, values = self.kv[index if layer.keys_of is None else layer.keys_of]
        if layer.owns_keys:
            keys[places.pages, places.slots] = k
            values[places.pages, places.slots] = v
        out = torch.empty_like(q)
        reach = reach_of(layer)
        for stretch in places.stretches:
            out[stretch.rows] = attend(
                q[stretch.rows],
                keys[stretch.pages].flatten(0, 1)[: stretch.num_keys],
                values[stretch.pages].flatten(0, 1)[: stretch.num_keys],
                stretch.positions,
                scale=spec.attention_scale,
                reach=reach,
                last_seen=None if layer.is_causal else stretch.last_seen,
                softcap=spec.attention_softcap,
                sinks=self.weights.get(f"{name}.sinks"),
            )
        if spec.attention_gate:
            gate = torch.sigmoid(self.linear(f"{name}.attn_gate", x))
            return self.linear(f"{name}.o", out.flatten(1) * gate)
        return self.linear(f"{name}.o", out.flatten(1))

    def projected(self, index: int, layer: LayerSpec, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of a layer, each [tokens, heads, head_dim].

        Of a layer that reads others' keys and values, those returned mean nothing.
        """
        spec, name = self.spec, f"layers.{index}"
        head_dim = spec.kv_heads_of(layer)[1]
        q = self.linear(f"{name}.q", x)
        if not layer.owns_keys:
            q = q.view(len(x), -1, head_dim)
            return q, q[:, :1], q[:, :1]
        k = v = self.linear(f"{name}.k", x)
        if layer.has_values:
            v = self.linear(f"{name}.v", x)
        if spec.qk_norm == QKNorm.FULL:
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        if spec.qkv_clip is not None:
            q, k, v = (part.clamp(-spec.qkv_clip, spec.qkv_clip) for part in (q, k, v))
        q, k, v = (part.view(len(x), -1, head_dim) for part in (q, k, v))
        if spec.value_norm:
            v = F.rms_norm(v, (head_dim,), eps=spec.norm_eps)
        return q, k, v

    def run_states(
        self,
        index: int,
        batch: Batch,
        places: Places,
        run: Callable[[slice, Tensor], Tensor],
    ) -> None:
        """Move the state of each sequence from slot to slot; drafts change no slot.

        Args:
            run: computes rows of a sequence behind a state; returns the state behind them.
        """
        states = self.states[index]
        assert batch.state_in is not None and batch.state_out is not None
        for stretch in places.stretches:
            rows, sequence = stretch.rows, batch.sequences[stretch.rows.start]
            slot_in, slot_out = batch.state_in[sequence], batch.state_out[sequence]
            before = states[slot_in] if slot_in >= 0 else torch.zeros_like(states[slot_out])
            end = rows.stop if batch.state_ends is None else int(batch.state_ends[sequence])
            after = run(slice(rows.start, end), before.to(self.device))
            states[slot_out] = after.to(states.device)
            if end < rows.stop:
                run(slice(end, rows.stop), after)

    def short_conv(
        self, index: int, conv: ShortConvSpec, x: Tensor, batch: Batch, places: Places
    ) -> Tensor:
        """Convolve each sequence's tokens behind its state, [tokens, hidden] -> the same."""
        name = f"layers.{index}"
        weight = self.weights[f"{name}.conv"].view(conv.channels, 1, conv.kernel_size)
        bias = self.weights.get(f"{name}.conv.bias")
        b, c, y = (self.linear(f"{name}.{part}", x) for part in ("in_b", "in_c", "in_x"))
        gated, mixed = b * y, torch.empty_like(c)

        def run(rows: slice, before: Tensor) -> Tensor:
            window = before.view(conv.kernel_size - 1, conv.channels)
            columns = torch.cat([window.to(gated), gated[rows]])
            summed = F.conv1d(columns.T[None], weight, bias, groups=conv.channels)[0].T
            mixed[rows] = c[rows] * summed
            return columns[-(conv.kernel_size - 1) :].flatten().float()

        self.run_states(index, batch, places, run)
        return self.linear(f"{name}.out", mixed)

    def delta_net(
        self, index: int, delta: GatedDeltaNetSpec, x: Tensor, batch: Batch, places: Places
    ) -> Tensor:
        """Let each sequence's tokens change its matrices, [tokens, hidden] -> the same."""
        name = f"layers.{index}.delta"
        channels = torch.cat([self.linear(f"{name}.{part}", x) for part in "qkv"], -1)
        kernels = torch.cat([self.weights[f"{name}.{part}.conv"] for part in "qkv"])
        kernels = kernels.view(-1, delta.kernel_size)
        betas = torch.sigmoid(self.linear(f"{name}.b", x)).float()
        low_a, low_z = x, x
        if delta.gate_rank:
            low_a, low_z = self.linear(f"{name}.a_in", x), self.linear(f"{name}.z_in", x)
        steps = F.softplus(self.linear(f"{name}.a", low_a).float())
        rates = self.weights[f"{name}.rate"].float()[:, None]
        decays = torch.exp(rates * steps.view(len(x), delta.num_value_heads, -1))
        read = torch.empty(len(x), delta.num_value_heads, delta.value_dim, device=x.device)

        def run(rows: slice, before: Tensor) -> Tensor:
            tokens = DeltaTokens(channels[rows].float(), decays[rows], betas[rows])
            read[rows], after = run_sequence(delta, kernels.float(), tokens, before)
            return after

        self.run_states(index, batch, places, run)
        read = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + self.spec.norm_eps)
        read = read * self.weights[f"{name}.gated_norm"].float()
        z = self.linear(f"{name}.z", low_z).float()
        gate = torch.sigmoid(z) if delta.gate_rank else F.silu(z)
        return self.linear(f"{name}.out", (gate * read.flatten(1)).to(self.dtype))

    def mamba2(
        self, index: int, mamba2: Mamba2Spec, x: Tensor, batch: Batch, places: Places
    ) -> Tensor:
        """Run Mamba-2 over each sequence's tokens, [tokens, hidden] -> the same."""
        prefix, weights = f"layers.{index}.", self.weights_of(index)
        parts = {name: self.linear(f"{prefix}in_{name}", x) for name in PARTS}
        mixed = torch.empty_like(parts["z"])

        def run(rows: slice, before: Tensor) -> Tensor:
            own = {name: part[rows] for name, part in parts.items()}
            out, behind = run_mamba2(mamba2, weights, own, before, self.spec.norm_eps)
            mixed[rows] = out.to(self.dtype)
            return behind

        self.run_states(index, batch, places, run)
        return self.linear(f"{prefix}out", mixed)

    def mamba(
        self, index: int, mamba: MambaSpec, x: Tensor, batch: Batch, places: Places
    ) -> Tensor:
        """Run Mamba over each sequence's tokens, [tokens, hidden] -> the same."""
        prefix, weights = f"layers.{index}.", self.weights_of(index)
        inputs = self.linear(f"{prefix}in_x", x)
        gate = F.silu(self.linear(f"{prefix}in_z", x).float())
        mixed = torch.empty_like(gate)

        def run(rows: slice, before: Tensor) -> Tensor:
            out, behind = run_mamba(mamba, weights, inputs[rows], before, self.spec.norm_eps)
            mixed[rows] = out * gate[rows]
            return behind

        self.run_states(index, batch, places, run)
        return self.linear(f"{prefix}out", mixed.to(self.dtype))

    def weights_of(self, index: int) -> dict[str, Tensor]:
        """Return the weights of a layer, under their names within it."""
        prefix = f"layers.{index}."
        return {
            name.removeprefix(prefix): weight
            for name, weight in self.weights.items()
            if name.startswith(prefix)
        }

    def latent_attention(
        self,
        index: int,
        layer: LayerSpec,
        latent: LatentAttentionSpec,
        x: Tensor,
        places: Places,
        rotations: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Write latents to the cache, expand them to keys and values, and attend to these."""
        spec, name = self.spec, f"layers.{index}"
        if latent.query_rank is None:
            q = self.linear(f"{name}.q", x)
        else:
            compressed = self.linear(f"{name}.q_a", x)
            compressed = self.latent_norm(f"{name}.q_a_norm", compressed, latent.norm_eps)
            q = self.linear(f"{name}.q_b", compressed)
        q = q.view(len(x), spec.num_heads, latent.query_dim)
        stored = self.linear(f"{name}.kv_a", x)[:, None]
        compressed, shared = stored[..., : latent.rank], stored[..., latent.rank :]
        nope, rotated = q[..., : latent.nope_dim], q[..., latent.nope_dim :]
        if layer.rope is not None:
            interleaved = spec.ropes[layer.rope].interleaved
            rotated = rotate(rotated, *rotations[layer.rope], interleaved)
            shared = rotate(shared, *rotations[layer.rope], interleaved)
        q = torch.cat([nope, rotated], -1)
        if layer.temperature is not None:
            q = q * temperatures(layer.temperature, places.positions)[:, None, None].to(self.dtype)
        cache = self.kv[index][0]
        compressed = self.latent_norm(f"{name}.kv_a_norm", compressed, latent.norm_eps)
        cache[places.pages, places.slots] = torch.cat([compressed, shared], -1)
        key_matrix = self.weights[f"{name}.k_b"].view(spec.num_heads, latent.rank, latent.nope_dim)
        value_matrix = self.weights[f"{name}.v_b"].view(spec.num_heads, -1, latent.rank)
        out = x.new_empty(len(x), spec.num_heads, latent.value_dim)
        for stretch in places.stretches:
            known = cache[stretch.pages].flatten(0, 2)[: stretch.num_keys]
            ranks, shared = known[:, : latent.rank], known[:, latent.rank :]
            keys = torch.einsum("kr,hrn->khn", ranks, key_matrix)
            shared = shared[:, None].expand(-1, spec.num_heads, -1)
            out[stretch.rows] = attend(
                q[stretch.rows],
                torch.cat([keys, shared], -1),
                torch.einsum("kr,hvr->khv", ranks, value_matrix),
                stretch.positions,
                scale=spec.attention_scale,
                reach=reach_of(layer),
            )
        return self.linear(f"{name}.o", out.flatten(1))

    def feed_forward(self, name: str, layer: LayerSpec, x: Tensor) -> Tensor:
        """Run a layer's MLP, or the mixture in its place."""
        if layer.mixture is None:
            out = self.mlp(name, x, layer.gate_cut)
        else:
            out = self.mixture(name, layer.mixture, x)
        return out * self.spec.mlp_multiplier

    def mixture_beside(self, name: str, mixture: MixtureSpec, x: Tensor) -> Tensor:
        """Add Gemma 4's shared MLP and its experts, whose inputs and outputs have own norms."""
        root = x.shape[-1] ** -0.5
        experts = self.mixture(
            name,
            replace(mixture, shared_intermediate_size=0),
            self.norm(f"{name}.expert_norm", x),
            routed=self.norm(f"{name}.router.norm", x) * root,
        )
        shared = self.mlp(f"{name}.shared", self.norm(f"{name}.mlp_norm", x))
        shared = self.norm(f"{name}.shared_post_norm", shared)
        return shared + self.norm(f"{name}.expert_post_norm", experts)

    def mlp(self, name: str, x: Tensor, gate_cut: float | None = None) -> Tensor:
        up = self.linear(f"{name}.up", x)
        if f"{name}.gate" in self.weights:
            gate = self.linear(f"{name}.gate", x) * self.spec.gate_multiplier
            if gate_cut is not None:
                deviation, mean = torch.std_mean(gate, -1, unbiased=False, keepdim=True)
                gate = F.relu(gate - (mean + deviation * gate_cut))
            up = self.activate(name, gate) * up
        else:
            up = self.activate(name, up)
        return self.linear(f"{name}.down", up)

    def activate(self, name: str, x: Tensor) -> Tensor:
        match self.spec.activation:
            case Activation.SILU:
                return F.silu(x)
            case Activation.GELU:
                return F.gelu(x)
            case Activation.GELU_TANH:
                return F.gelu(x, approximate="tanh")
            case Activation.RELU2:
                return F.relu(x).square()
            case Activation.XIELU:
                of = (self.weights[f"{name}.{part}"] for part in XIELU)
                return xielu(x, *of)

    def clamped_mlp(self, name: str, clamp: float, beta: float, x: Tensor) -> Tensor:
        """Run an expert of gpt-oss."""
        gate = self.linear(f"{name}.gate", x).clamp(max=clamp)
        up = self.linear(f"{name}.up", x).clamp(-clamp, clamp)
        return self.linear(f"{name}.down", (up + 1) * gate * torch.sigmoid(beta * gate))

    def mixture(
        self, name: str, mixture: MixtureSpec, x: Tensor, routed: Tensor | None = None
    ) -> Tensor:
        """Add the experts of each token in the order of its choice, then the shared MLP.

        Args:
            routed: what the router reads, if not x.
        """
        logits = self.linear(f"{name}.router", x if routed is None else routed).float()
        selection_bias = self.weights.get(f"{name}.router.selection_bias")
        experts, weights = choose_experts(mixture, logits, selection_bias)
        if mixture.expert_scales:
            weights = weights * self.weights[f"{name}.router.scales"].float()[experts]
        out = torch.zeros_like(x)
        for slot in range(mixture.experts_per_token):
            for expert in mixture.own_experts:
                rows = experts[:, slot] == expert
                if not rows.any():
                    continue
                expert_name = f"{name}.experts.{expert}"
                own, weight = x[rows], weights[rows, slot, None].to(self.dtype)
                if mixture.weighs_inputs:
                    own, weight = own * weight, torch.ones_like(weight)
                if mixture.clamp is None:
                    y = self.mlp(expert_name, own)
                else:
                    y = self.clamped_mlp(expert_name, mixture.clamp, mixture.swish_beta, own)
                out[rows] += y * weight
        if mixture.shared_intermediate_size:
            shared = self.mlp(f"{name}.shared", x)
            if mixture.shared_gate:
                shared = shared * torch.sigmoid(self.linear(f"{name}.shared.router", x))
            out = out + shared
        return out

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[name], self.weights.get(f"{name}.bias"))

    def latent_norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        """Normalize a latent, in fp32: by its root mean square, whatever the decoder's norm."""
        weight = self.weights[name].float()
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(self.dtype)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Normalize the last dimension, in fp32."""
        weight = self.weights[name].float()
        y = x.float()
        if self.spec.norm.subtracts_mean:
            y = y - y.mean(-1, keepdim=True)
        if self.spec.norm.adds_one:
            weight = weight + 1
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.spec.norm_eps)
        y = y * weight
        if (bias := self.weights.get(f"{name}.bias")) is not None:
            y = y + bias.float()
        return y.to(self.dtype)


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """Return Apertus' activation, whose alphas are stored before their softplus."""
    above = F.softplus(alpha_p) * x * x
    below = (beta + F.softplus(alpha_n)) * (torch.expm1(torch.min(x, eps)) - x)
    return torch.where(x > 0, above, below) + beta * x


def reach_of(layer: LayerSpec) -> Reach:
    """Return what a layer's tokens attend to."""
    if layer.window is None:
        return Reach()
    return Reach(chunk=layer.window) if layer.is_chunked else Reach(before=layer.window - 1)


def temperatures(temperature: QueryTemperature, positions: Tensor) -> Tensor:
    """Return what queries are multiplied by, fp32."""
    steps = torch.floor((positions.float() + temperature.offset) / temperature.tokens)
    return torch.log1p(steps) * temperature.scale + 1


def rotation(rope: RopeTable, inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the pairs of tokens, both [tokens, 1, rotary_dim / 2], fp32.

    Args:
        positions: [tokens, 3]
    """
    axes = torch.tensor(rope.axes or [0] * len(inv_freq), device=inv_freq.device)
    angles = (positions.float()[:, axes] * inv_freq)[:, None]
    return angles.cos() * rope.scale, angles.sin() * rope.scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the pairs of [tokens, heads, head_dim]; dimensions from rotary_dim on stay."""
    rotary_dim = 2 * cos.shape[-1]
    rotated, kept = x[..., :rotary_dim].float().contiguous(), x[..., rotary_dim:]
    dim = -1 if interleaved else -2
    pairs = rotated.view(*x.shape[:-1], *((-1, 2) if interleaved else (2, -1)))
    a, b = pairs.unbind(dim)
    rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim).flatten(-2).to(x.dtype)
    return torch.cat((rotated, kept), -1)
