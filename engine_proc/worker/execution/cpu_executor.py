"""Runs a `DecoderSpec` on the CPU: one call into `csrc/cpu` per step, without the GIL.

Activations are fp32. Factors of a product are rounded for weights in `int8` and `fixed16`. On
request they are for bf16 weights, to bf16, and for packed ones, to 16 bits. Every sum has one
order, so the logits of a token have the same bits with any batch mates, chunking and number of
threads.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Set
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from enum import StrEnum
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.collectives.shm_all_reduce import ShmAllReduce
from headrace.engine_proc.shm.cache_memory import CacheMemory
from headrace.engine_proc.worker.checkpoints.file_order import fits_twice, in_file_order
from headrace.engine_proc.worker.checkpoints.file_reader import FileReader
from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor, Weight, Weights
from headrace.engine_proc.worker.execution.cpu_layers import (
    LayerConfig,
    RopeConfig,
    gemma_fields,
    held_vector,
    layer_configs,
    why_no_gemma,
    why_no_mixer,
)
from headrace.engine_proc.worker.execution.cpu_mixture import why_not
from headrace.engine_proc.worker.execution.eagle_executor import eagle_fields
from headrace.engine_proc.worker.execution.executor import Batch, Floats, Logits
from headrace.engine_proc.worker.execution.held_matrices import (
    FORMATS,
    LANES,
    CoreFormat,
    HeldFormat,
    HeldMatrix,
    Place,
    WeightDtype,
    activation_bits,
    held_format,
    held_matrices,
    is_vector,
    place_of,
)
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    Activation,
    DecoderSpec,
    NormPlacement,
    QKNorm,
)
from headrace.engine_proc.worker.models.weight_shapes import check_shapes, weight_shapes
from headrace.engine_proc.worker.parallel.peers import Peers
from headrace.errors import ModelError
from headrace.native_core import check_structs, load_core
from headrace.system.machine import usable_cores

BLOCK_TOKENS = 64  # of csrc/cpu/operands.h
SEGMENT_TOKENS = 256  # of csrc/cpu/attention.h
WAITING_WEIGHTS = 64  # that are being packed, or will be next
WAITING_THREADS = 4  # that wait for files while others pack
PACK_NUMBERS = 1 << 20  # decoded at a time while packing: 4 MB of fp32
KEPT_BYTES = 1 << 27  # of logits from step to step; a prompt's log probabilities take more


class UnsupportedSpec(ModelError):
    """The spec has a field that this executor cannot honor; the text names it."""


class KVDtype(StrEnum):
    """The format of keys and values: exact, or rounded in half the memory."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Isa(StrEnum):
    """The instruction set; `BEST` is the widest this processor has."""

    BEST = "best"
    PORTABLE = "portable"
    AVX2 = "avx2"
    AVX512 = "avx512"
    NEON = "neon"  # of arm64, with all else that the processor has


KV_FORMATS = {KVDtype.FLOAT32: Format.F32, KVDtype.BFLOAT16: Format.BF16}
# The order of these is the numbering of csrc/cpu.
ISAS = tuple(Isa)
PLACEMENTS = tuple(NormPlacement)
QK_NORMS = tuple(QKNorm)
STEP_PARTS = ("rows", "products", "attention", "experts", "head", "waiting")
ACTIVATIONS = tuple(Activation)
SAMPLED_ROWS = 64  # that tell whether a matrix of bf16 suits it


class Config(Structure):
    """`Config` of csrc/cpu/model.h."""

    _fields_ = (
        *((name, c_int32) for name in ("vocab_size", "hidden_size", "num_heads")),
        *((name, c_int32) for name in ("num_layers", "num_ropes", "num_mtp_layers", "layer_norm")),
        *((name, c_int32) for name in ("placement", "qk_norm", "activation", "gated_mlp")),
        *((name, c_int32) for name in ("num_pages", "page_tokens", "num_states", "shares_pages")),
        ("kv_format", c_int32),
        *((name, c_int32) for name in ("num_threads", "isa")),
        *((name, c_int32) for name in ("rounds_activations", "activation_bits")),
        *((name, c_float) for name in ("norm_eps", "qkv_clip", "attention_scale")),
        *((name, c_float) for name in ("attention_softcap", "logit_softcap")),
        *((name, c_float) for name in ("embedding_multiplier", "residual_multiplier")),
        *((name, c_float) for name in ("logit_multiplier", "gate_multiplier", "mlp_multiplier")),
        *((name, c_int32) for name in ("value_norm", "per_layer_size", "per_layer_vocab")),
        *((name, c_int32) for name in ("num_residuals", "laurel_rank", "scales_output")),
        *((name, c_int32) for name in ("deepstack", "eagle", "num_embedded")),
    )


class NativeStep(Structure):
    """`NativeStep` of csrc/cpu/model.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("token_ids", "positions", "sequences")),
        *((name, c_void_p) for name in ("page_table", "logit_rows", "embed_rows")),
        *((name, c_void_p) for name in ("rope_positions", "last_seen", "token_types", "embeds")),
        *((name, c_void_p) for name in ("logits", "maxima", "hidden")),
        *((name, c_void_p) for name in ("state_in", "state_out", "state_ends", "adapters")),
        *((name, c_int32) for name in ("num_tokens", "num_sequences")),
        *((name, c_int32) for name in ("max_pages", "num_logit_rows", "num_embeds", "is_draft")),
    )


class CpuExecutor:
    """An `Executor`. One step runs at a time; a second caller waits.

    Args:
        page_tokens: a multiple of 16 that divides 256.
        num_states: slots for the states of sequences, in decoders that have some.
        weight_dtype: `packed` keeps what is stored, but decodes F16 to fp32, which is exact.
            `int8` rounds activations, too, to 8 bits.
        rounds_activations: to bf16 where they meet weights in bf16, and in attention to keys and
            values in bf16, as other engines do. Twice as fast for many tokens where the processor
            multiplies bf16. To 16 bits, in groups of 32, where they meet quantized weights, but for
            `int8_weight_only`: twice as fast. Sums stay fp32.
        threads: of one step, the caller's included. By default, one per core we may use.
        peers: the workers that run the other shares of `spec` and `weights`, which are the whole
            model's. All run the same steps in the same order; each returns the same.
        progress: called with (weights packed, weights in all) while loading.
        memory: of pages and states, `cache_bytes` long from `memory_start` on; by default they
            have memory of their own.

    Raises:
        UnsupportedSpec: a size that the kernels cannot take.
        ModelError: a weight is missing or has another shape than the spec says.
        MemoryError: weights or pages do not fit.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        *,
        num_pages: int,
        page_tokens: int = 32,
        num_states: int = 0,
        weight_dtype: WeightDtype | str = WeightDtype.PACKED,
        kv_dtype: KVDtype | str = KVDtype.FLOAT32,
        rounds_activations: bool = False,
        threads: int | None = None,
        isa: Isa | str = Isa.BEST,
        peers: Peers[ShmAllReduce] | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        memory: CacheMemory | None = None,
        memory_start: int = 0,
    ) -> None:
        self.model = c_void_p()  # for __del__, should anything below raise
        check_sizes(spec, page_tokens)
        check_shapes(spec, weights)
        self.vocab_size = spec.vocab_size
        self._room = self.room_for(0)
        self.peers = peers
        whole = spec
        if peers is not None:
            spec, weights = peers.share_of(spec, weights)
        self.spec = spec
        self.page_tokens = page_tokens
        self.weight_dtype = WeightDtype(weight_dtype)
        self.activation_bits = activation_bits(self.weight_dtype, rounds_activations)
        self.core = declared_core()
        config = Config(
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            num_heads=spec.num_heads,
            num_layers=len(spec.layers),
            num_ropes=len(spec.ropes),
            num_mtp_layers=spec.num_mtp_layers,
            layer_norm=spec.norm.subtracts_mean,
            placement=PLACEMENTS.index(spec.placement),
            qk_norm=QK_NORMS.index(spec.qk_norm),
            activation=ACTIVATIONS.index(spec.activation),
            gated_mlp=spec.gated_mlp,
            num_pages=num_pages,
            page_tokens=page_tokens,
            num_states=num_states,
            shares_pages=spec.encoder is not None,
            kv_format=FORMATS.index(KV_FORMATS[KVDtype(kv_dtype)]),
            num_threads=threads or usable_cores(),
            isa=ISAS.index(Isa(isa)),
            rounds_activations=rounds_activations,
            activation_bits=self.activation_bits,
            norm_eps=spec.norm_eps,
            qkv_clip=spec.qkv_clip or 0.0,
            attention_scale=spec.attention_scale,
            attention_softcap=spec.attention_softcap or 0.0,
            logit_softcap=spec.logit_softcap or 0.0,
            embedding_multiplier=spec.embedding_multiplier,
            residual_multiplier=spec.residual_multiplier,
            logit_multiplier=spec.logit_multiplier,
            gate_multiplier=spec.gate_multiplier,
            mlp_multiplier=spec.mlp_multiplier,
            value_norm=spec.value_norm,
            deepstack=spec.deepstack,
            **(eagle_fields(spec) | gemma_fields(whole)),
        )
        self._memory = memory  # lives as long as the core uses it
        place = None if memory is None else memory.address + memory_start
        self.model = c_void_p(self.core.headrace_cpu_create(config, *layer_configs(spec), place))
        if not self.model:
            raise MemoryError(
                f"{num_pages} KV pages of {page_tokens} tokens and {num_states} states do not fit"
            )
        self.isa = ISAS[self.core.headrace_cpu_isa(self.model)]  # the one in use
        if self.isa == Isa.BEST:
            raise UnsupportedSpec(f"this processor has no {isa}")
        if peers is not None:
            self.join(peers, whole)
        self.load_all(weights, config.num_threads, progress)

    def __del__(self) -> None:
        if self.model:
            self.core.headrace_cpu_destroy(self.model)

    def join(self, peers: Peers[ShmAllReduce], whole: DecoderSpec) -> None:
        """Join the workers of a model."""
        first_tokens = [*(shard.tokens.start for shard in peers.shards), whole.vocab_size]
        self.core.headrace_cpu_join(
            self.model,
            peers.group.rank,
            len(peers.shards),
            peers.group.handle,
            (c_int32 * len(first_tokens))(*first_tokens),
            whole.num_heads,
            whole.num_kv_heads,
            peers.shard.owns_keys,
        )

    def be_drafted_by(self, drafter: "CpuExecutor") -> None:
        """Have steps write the hidden states that EAGLE-3's layer reads into its pages."""
        assert drafter.spec.eagle is not None
        self._drafter = drafter  # lives as long as the core uses it
        tapped = (c_int32 * 3)(*drafter.spec.eagle.tapped)
        self.core.headrace_cpu_draft_for(drafter.model, self.model, tapped)

    def load_all(
        self, weights: Weights, threads: int, progress: Callable[[int, int], None]
    ) -> None:
        """Load all weights of our share."""
        is_rounded = self.activation_bits != 0
        self.matrices = held_matrices(
            self.spec, lambda name: held_format(name, weights[name], self.weight_dtype, is_rounded)
        )
        places = in_file_order(weights, weight_shapes(self.spec))
        extents = places.values()
        reader = FileReader(extents, keeps_cache=self.peers is not None or fits_twice(extents))
        waiting: deque[tuple[int, list[Future[None]]]] = deque()

        def finish_first() -> None:
            index, parts = waiting.popleft()
            for packed in parts:
                packed.result()
            progress(index + 1, len(places))

        progress(0, len(places))
        with ThreadPoolExecutor(threads + WAITING_THREADS) as pool:
            for matrix in self.matrices.values():
                self.allocate(matrix, weights, reader)
            for index, name in enumerate(places):
                waiting.append((index, self.load(name, weights[name], reader, pool)))
                if len(waiting) > WAITING_WEIGHTS:
                    finish_first()
            while waiting:
                finish_first()

    def allocate(self, matrix: HeldMatrix, weights: Weights, reader: FileReader) -> None:
        """Find memory for a matrix."""
        first = weights[matrix.names[0]]
        format = matrix.format
        if matrix.format == first.format == Format.BF16 and self.suits_bf12(
            reader.read(sample(first))
        ):
            format = CoreFormat.BF12
        where = (self.model, matrix.place.layer, matrix.place.slot)
        number = FORMATS.index(format)
        if not self.core.headrace_cpu_allocate(*where, number, matrix.num_rows, first.shape[1]):
            raise MemoryError(f"weight {matrix.names[0]!r} does not fit")

    def load(
        self, name: str, tensor: Weight, reader: FileReader, pool: ThreadPoolExecutor
    ) -> list[Future[None]]:
        """Load one weight. `pool` packs a matrix; no thread holds more than a slice decoded."""
        place = place_of(self.spec, name)
        if is_vector(name, tensor.shape):
            self.set_vector(name, place, tensor, reader)
            return []
        num_rows, num_cols = tensor.shape
        step = max(LANES, PACK_NUMBERS // num_cols // LANES * LANES)

        def pack(first: int) -> None:
            rows = tensor.rows(first, min(first + step, num_rows))
            self.pack(place, first, reader.read(rows).stored())

        return [pool.submit(pack, first) for first in range(0, num_rows, step)]

    def set_vector(self, name: str, place: Place, tensor: Weight, reader: FileReader) -> None:
        """Load a weight that the core has as numbers."""
        numbers = held_vector(self.spec, name, place, reader.read(tensor).to_float32())
        where = (self.model, place.layer, place.slot)
        self.core.headrace_cpu_set_vector(
            *where, place.first_row, numbers.ctypes.data, len(numbers)
        )

    def pack(self, place: Place, first: int, rows: StoredTensor) -> None:
        """Pack rows of a weight, from its row `first` on."""
        format = self.matrices[place.layer, place.slot].format
        if format == Format.Q8_0 != rows.format:
            rows = rows.to_q8_0()
        elif format == Format.Q4_0 != rows.format:
            rows = rows.to_q4_0()
        kept = Format.Q8_0 if format is None else format  # what need not be decoded
        if kept == rows.format and kept != Format.F32:
            data: npt.NDArray[Any] = np.ascontiguousarray(rows.data)
            store = self.core.headrace_cpu_pack_stored
        else:
            data = np.ascontiguousarray(rows.to_float32())
            store = self.core.headrace_cpu_pack_float
        where = (self.model, place.layer, place.slot)
        store(*where, place.first_row + first, rows.shape[0], data.ctypes.data)

    def suits_bf12(self, rows: Weight) -> bool:
        """Return whether the core can hold a matrix in 12 bits, by some of its rows of bf16."""
        data = np.ascontiguousarray(rows.stored().data)
        return bool(self.core.headrace_cpu_suits_bf12(self.model, data.ctypes.data, *rows.shape))

    def forward(self, batch: Batch) -> Floats:
        """Write the batch's keys and values; return the logits of its rows, [rows, vocab_size]."""
        logits, maxima = self.room_for(len(batch.logit_rows))
        self.step(batch, logits, maxima)
        return logits[:, : self.vocab_size]

    def logits(self, batch: Batch) -> Logits:
        """Do as `forward`, with maxima, in memory that the next step may take again.

        Large arrays that are new in each step have all their pages cleared by the system.
        """
        num_rows = len(batch.logit_rows)
        logits, maxima = self._room
        if num_rows > len(logits):
            logits, maxima = self.room_for(num_rows)
            if logits.nbytes <= KEPT_BYTES:
                self._room = logits, maxima
        self.step(batch, logits, maxima)
        return Logits(logits[:num_rows, : self.vocab_size], maxima[:num_rows])

    def room_for(self, num_rows: int) -> tuple[Floats, Floats]:
        """Return memory for the logits of so many rows, and for their maxima.

        Rows begin with a cache line, since vectors are written that are one, and are `stride_of`
        csrc/cpu/step_state.h long.
        """
        stride = (-(-self.vocab_size // LANES) + 1) * LANES
        room = np.empty(num_rows * stride + LANES, np.float32)
        begin = -room.ctypes.data // room.itemsize % LANES
        logits = room[begin : begin + num_rows * stride].reshape(num_rows, stride)
        return logits, np.empty((num_rows, -(-self.vocab_size // BLOCK_TOKENS)), np.float32)

    def rest(self) -> None:
        """Give back what steps take beside weights and pages; the next step takes it again."""
        self.core.headrace_cpu_rest(self.model)
        self._room = self.room_for(0)

    def step_seconds(self) -> dict[str, float]:
        """Return where the time of steps went since the last call, by part; the first call begins.

        "waiting" is the calling thread's, for other threads at the end of a parallel phase.
        """
        seconds = (c_double * len(STEP_PARTS))()
        self.core.headrace_cpu_step_seconds(self.model, seconds)
        return dict(zip(STEP_PARTS, seconds, strict=True))

    def embed(self, batch: Batch) -> Floats:
        """Do as `forward`, but return what the head would see, [rows, hidden_size]."""
        hidden = np.empty((len(batch.logit_rows), self.spec.hidden_size), np.float32)
        self.step(batch, hidden=hidden)
        return hidden

    def step(
        self,
        batch: Batch,
        logits: Floats | None = None,
        maxima: Floats | None = None,
        hidden: Floats | None = None,
    ) -> None:
        """Run one step and fill logits and their maxima, or else hidden.

        Raises:
            CollectiveFailed: another worker is gone.
        """
        fields = (
            batch.token_ids,
            batch.positions,
            batch.sequences,
            batch.page_table,
            batch.logit_rows,
        )
        arrays = [np.ascontiguousarray(field, np.int32) for field in fields]
        num_tokens = len(arrays[0])
        assert all(array.shape == arrays[0].shape for array in arrays[:3])
        columns = (batch.embed_rows, batch.rope_positions, batch.last_seen, batch.token_types)
        assert all(column is None or len(column) == num_tokens for column in columns)
        if batch.embed_rows is not None:
            assert batch.embeds is not None and batch.embeds.shape[1] == self.spec.row_size
        step = NativeStep(
            *(array.ctypes.data for array in arrays),
            *(address(column) for column in columns),
            address(batch.embeds),
            address(logits),
            address(maxima),
            address(hidden),
            address(batch.state_in),
            address(batch.state_out),
            address(batch.state_ends),
            address(batch.adapters),
            num_tokens,
            *arrays[3].shape,
            len(arrays[4]),
            0 if batch.embeds is None else len(batch.embeds),
            batch.is_draft,
        )
        status: int = self.core.headrace_cpu_step(self.model, ctypes.byref(step))
        if status == 1:
            raise ValueError(
                "the batch names a token, position, sequence, page, state, adapter or row beyond "
                "its range"
            )
        if status == 2:
            raise MemoryError(f"a step of {num_tokens} tokens does not fit")
        if status == 3:
            assert self.peers is not None
            self.peers.group.check()


def sample(tensor: Weight) -> Weight:
    """Return rows that tell whether a matrix of bf16 suits bf12."""
    num_rows = tensor.shape[0]
    first = max(0, num_rows - SAMPLED_ROWS) // 2
    return tensor.rows(first, min(first + SAMPLED_ROWS, num_rows))


def address(array: npt.NDArray[Any] | None) -> int | None:
    """Return where an array's numbers are, one after the other."""
    if array is None:
        return None
    assert array.flags.c_contiguous and array.dtype in (np.int32, np.float32)
    return int(array.ctypes.data)


def check_sizes(spec: DecoderSpec, page_tokens: int) -> None:
    """Raise the errors of the class where kernels would read out of bounds."""
    if page_tokens < LANES or page_tokens % LANES or SEGMENT_TOKENS % page_tokens:
        raise ValueError(f"page_tokens is {page_tokens}, not a multiple of 16 that divides 256")
    for layer in spec.layers:
        num_kv_heads, head_dim = spec.kv_heads_of(layer)
        if spec.num_heads % num_kv_heads:
            raise UnsupportedSpec(
                f"num_heads {spec.num_heads} is not a multiple of num_kv_heads {num_kv_heads}"
            )
        if layer.rope is not None and 2 * len(spec.ropes[layer.rope].inv_freq) > head_dim:
            num_pairs = len(spec.ropes[layer.rope].inv_freq)
            raise UnsupportedSpec(f"ropes: {num_pairs} pairs in a head_dim of {head_dim}")
    if why := why_no_gemma(spec):
        raise UnsupportedSpec(why)
    has_pages = [layer for layer in spec.layers if layer.has_pages]
    if spec.latent is not None and any(layer.mixer != spec.latent for layer in has_pages):
        raise UnsupportedSpec("layers differ in what their pages hold: latents, or keys and values")
    for layer in spec.layers:
        if layer.mixer is not None and (why := why_no_mixer(layer.mixer)):
            raise UnsupportedSpec(why)
        if layer.mixture is not None and (why := why_not(layer.mixture)):
            raise UnsupportedSpec(why)


def prefers_fixed16(formats: Set[Format]) -> bool:
    """Return whether `FIXED16` is faster here than layers as stored, in these formats."""
    is_wide = formats <= {Format.F32, Format.F16, Format.BF16}
    return is_wide and bool(declared_core().headrace_cpu_prefers_fixed16(Format.BF16 in formats))


def matrix_bytes(format: HeldFormat, shape: tuple[int, ...]) -> int:
    """Return what a matrix takes in the core; None is int8. BF16 may take a quarter less."""
    nbytes: int = declared_core().headrace_cpu_matrix_bytes(FORMATS.index(format), *shape)
    return nbytes


@cache
def declared_core() -> ctypes.CDLL:
    """Return the core, with the types of the functions of csrc/cpu/api.cpp.

    Raises:
        HeadraceError: it was built from another version.
    """
    core = load_core()
    structs = (Config, LayerConfig, RopeConfig, NativeStep)
    check_structs(core, "headrace_cpu_struct_bytes", structs)
    configs = (POINTER(Config), POINTER(LayerConfig), POINTER(RopeConfig))
    where = (c_void_p, c_int32, c_int32)
    for name, result, arguments in (
        ("create", c_void_p, (*configs, c_void_p)),
        ("destroy", None, (c_void_p,)),
        ("isa", c_int32, (c_void_p,)),
        ("allocate", c_int32, (*where, c_int32, c_int32, c_int32)),
        ("prefers_fixed16", c_int32, (c_int32,)),
        ("matrix_bytes", c_int64, (c_int32, c_int32, c_int32)),
        ("suits_bf12", c_int32, (c_void_p, c_void_p, c_int32, c_int32)),
        ("pack_float", None, (*where, c_int32, c_int32, c_void_p)),
        ("pack_stored", None, (*where, c_int32, c_int32, c_void_p)),
        ("set_vector", None, (*where, c_int32, c_void_p, c_int32)),
        ("join", None, (*where, c_void_p, POINTER(c_int32), c_int32, c_int32, c_int32)),
        ("draft_for", None, (c_void_p, c_void_p, POINTER(c_int32))),
        ("rest", None, (c_void_p,)),
        ("step", c_int32, (c_void_p, POINTER(NativeStep))),
        ("step_seconds", None, (c_void_p, POINTER(c_double))),
    ):
        function = core[f"headrace_cpu_{name}"]
        function.restype = result
        function.argtypes = arguments
        setattr(core, f"headrace_cpu_{name}", function)
    return core
