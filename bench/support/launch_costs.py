"""What a launch moves and computes, at least: bytes to and from memory, each once, and operations.

Numbers that lie in caches are counted once, however many programs load them. What the device alone
knows of a step (lengths, experts) is given.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import torch
from torch import Tensor

from headrace.engine_proc.worker.cuda.attention.tile_schedule import (
    COUNT,
    ITEM_NUMBERS,
    NUM_SHARING,
    POSITION,
    SEQUENCE,
    SHARE,
    TAIL,
    Stretches,
    first_key_of,
    reference,
)
from headrace.engine_proc.worker.cuda.mixers.token_blocks import BLOCK_TOKENS
from headrace.engine_proc.worker.cuda.residuals.cut_gates import GIVEN, SQUARES, SUMS
from headrace.engine_proc.worker.cuda.step_inputs import StepInputs
from headrace.system.all_reduce_policy import Algorithm
from support.step_launches import GATHER, Launch

FLOAT = 4  # bytes
# What kernels write; they read all else. In place are those that are read, too.
WRITTEN = {
    "inputs_kernel": tuple(field.name for field in fields(StepInputs)),
    "schedule_kernel": ("items",),
    "norm_kernel": ("out",),
    "squares_kernel": ("sums",),
    "linear_kernel": ("out",),
    "gated_linear_kernel": ("out",),
    "gate_kernel": ("out",),
    "fp8_kernel": ("out",),
    "int4_kernel": ("out",),
    "decode_kernel": ("out",),
    "round_kernel": ("codes", "scales"),
    "rope_store_kernel": ("queries", "keys", "values"),
    "attention_kernel": ("out",),
    "router_kernel": ("experts", "weights", "counts"),
    "sort_kernel": ("pairs", "table", "count"),
    "expert_kernel": ("out",),
    "sum_kernel": ("out",),
    "moves_kernel": ("sequences", "slots"),
    "conv_kernel": ("out",),
    "delta_block_kernel": ("read",),
    "ssd_kernel": ("out",),
    "gated_norm_kernel": ("out",),
    "begin_kernel": ("out",),
    "predict_kernel": ("predicted", "x"),
    "correct_kernel": ("residuals", "seen"),
    "spread_kernel": (),
    "join_kernel": ("out",),
    "normed_sum_kernel": ("out",),
    "cut_gates_kernel": ("out",),
    "layer_inputs_kernel": ("out",),
    "meet_inputs_kernel": ("out",),
    "scale_kernel": ("out",),
}
IN_PLACE = ("residual", "sums_of_parts", "partial", "states", "kept_steps", "kept_keys")
IN_PLACE += ("kept_values",)
RECURRENCES = ("conv_kernel", "delta_block_kernel", "ssd_kernel")
ATTENDED = ("items", "keys", "values", "page_table", "partial")
# Some numbers for each tile, or sequence: not counted.
SMALL = ("turns", "table", "num_tiles")
SMALL_OF_RECURRENCES = ("query_starts", "slots", "positions", "sequences")
PICKS_ROWS = ("aten::embedding", "aten::index_select", "aten::index")  # of the first argument
SETS_ALL = ("aten::copy_", "aten::zero_", "aten::fill_")  # and reads nothing of what was there
BARRIERS = {Algorithm.ONE_SHOT.value: 1, Algorithm.TWO_SHOT.value: 2, GATHER: 1}
# One-shot of an input that is read in place ends with a second one.


@dataclass(frozen=True)
class StepShape:
    """What only the device knows of a step, padding included."""

    query_starts: Sequence[int]  # [sequences + 1]
    num_keys: Sequence[int]  # [sequences]
    page_tokens: int
    num_packed: int  # numbers that the step is sent as
    num_drawn: int = 0  # token ids that come from the step before
    num_experts: float = 0  # of a layer, that some token chose
    num_states: int = 0  # sequences that have a state to read

    @property
    def stretches(self) -> Stretches:
        """The same, as kernels take it."""
        starts, keys = (
            torch.tensor(x, dtype=torch.int32) for x in (self.query_starts, self.num_keys)
        )
        return Stretches(starts, keys, torch.empty(0))

    @property
    def counts(self) -> list[int]:
        """Tokens of each sequence."""
        return [end - start for start, end in pairwise(self.query_starts)]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Positions of each sequence's first token in the step, and behind its last."""
        pairs = zip(self.counts, self.num_keys, strict=True)
        return [(keys - count, keys) for count, keys in pairs if keys]

    @property
    def num_stored(self) -> int:
        """Tokens whose keys are stored: those of sequences that have keys."""
        return sum(n for n, keys in zip(self.counts, self.num_keys, strict=True) if keys)

    @property
    def num_pages(self) -> int:
        """Pages that sequences have keys in."""
        return sum(-(-keys // self.page_tokens) for keys in self.num_keys)


@dataclass(frozen=True)
class Tiles:
    """Attention's work: the tiles of a launch, each with its first key and the end of its keys."""

    items: list[list[int]]
    keys: list[range]
    split_keys: int
    num_items: int  # programs for each group of heads, idle ones included

    @property
    def splits(self) -> list[int]:
        """How many splits each item's tile has."""
        return [
            max(keys.stop - 1, 0) // self.split_keys - keys.start // self.split_keys + 1
            for keys in self.keys
        ]

    @property
    def longest(self) -> int:
        """The most splits that a program takes in a row."""
        sharing = [item[NUM_SHARING.value] for item in self.items]
        return max(-(-num // n) for num, n in zip(self.splits, sharing, strict=True))

    @property
    def num_loaded(self) -> int:
        """Keys that programs load, those of a tile once, whatever caches have."""
        shares = (item[SHARE.value] for item in self.items)
        return sum(len(keys) for keys, share in zip(self.keys, shares, strict=True) if not share)

    @property
    def num_left(self) -> int:
        """Splits of a token that programs leave for each other."""
        return sum(
            num * item[COUNT.value]
            for num, item in zip(self.splits, self.items, strict=True)
            if item[NUM_SHARING.value] > 1 and item[SHARE.value] == 0
        )


@dataclass(frozen=True)
class Cost:
    """Bytes by argument, and floating-point operations."""

    read: Counter[str]
    written: Counter[str]
    operations: float = 0.0

    @property
    def num_bytes(self) -> float:
        """Bytes that are read or written."""
        return self.read.total() + self.written.total()


def tiles_of(schedule: Launch, shape: StepShape) -> Tiles:
    """Return the work that a launch of `schedule_kernel` hands out."""
    given = schedule.arguments
    window, is_chunked = given["WINDOW"] or None, given["IS_CHUNKED"]
    items = reference(
        shape.stretches,
        tile_tokens=given["TILE_TOKENS"],
        split_keys=given["SPLIT_KEYS"],
        window=window,
        num_extra=given["num_extra"],
        capacity=given["capacity"],
        is_chunked=is_chunked,
    )
    firsts = [first_key_of(item[POSITION.value], window, is_chunked) for item in items]
    ends = [max(item[POSITION.value] + item[COUNT.value], 0) for item in items]
    keys = [range(first, max(first, end)) for first, end in zip(firsts, ends, strict=True)]
    return Tiles(items, keys, given["SPLIT_KEYS"], given["num_items"])


def cost_of(launch: Launch, shape: StepShape, tiles: Tiles | None = None) -> Cost:
    """Return what a launch costs.

    Args:
        tiles: of attention.
    """
    if launch.kernel in BARRIERS:
        return Cost(Counter(), Counter())
    if launch.kernel.startswith("aten::"):
        return cost_of_operator(launch)
    written_names = WRITTEN[launch.kernel]
    read, written = Counter[str](), Counter[str]()
    seen: list[Tensor] = []
    for name, tensor in launch.tensors.items():
        if is_small(launch, name):
            continue
        num_bytes = bytes_of(launch, name, tensor, shape, tiles)
        if name in written_names:
            written[name] = num_bytes[1]
            if launch.kernel == "normed_sum_kernel" and launch.arguments["HAS_RESIDUAL"]:
                read[name] = num_bytes[0]
        elif not any(tensor is other for other in seen):
            read[name] = num_bytes[0]
            if is_in_place(launch, name):
                written[name] = num_bytes[1]
        if name not in written_names or launch.kernel != "norm_kernel":  # which may be in place
            seen.append(tensor)
    return Cost(+read, +written, operations_of(launch, shape, tiles))


def is_small(launch: Launch, name: str) -> bool:
    """Whether an argument of a kernel is too small to be counted."""
    return name in SMALL or (launch.kernel in RECURRENCES and name in SMALL_OF_RECURRENCES)


def is_in_place(launch: Launch, name: str) -> bool:
    """Whether a kernel writes an argument that it reads, too."""
    if name == "residual":
        return bool(launch.arguments["HAS_RESIDUAL"])
    return name in IN_PLACE or (launch.kernel, name) == ("spread_kernel", "residuals")


def cost_of_operator(launch: Launch) -> Cost:
    """Return what an operator of torch costs."""
    tensors = launch.tensors
    result = tensors.pop("out", None)
    changed = tensors.pop("in place", None)
    if launch.kernel in PICKS_ROWS and result is not None:
        read = {name: x.nbytes for name, x in tensors.items() if name != "0"} | {"0": result.nbytes}
        return Cost(Counter(read), Counter({"out": result.nbytes}))
    read = {
        name: dense_bytes(x)
        for name, x in tensors.items()
        if not (launch.kernel in SETS_ALL and x is changed)
    }
    results = {"out": result, "in place": changed}
    written = {name: dense_bytes(x) for name, x in results.items() if x is not None}
    return Cost(Counter(read), Counter(written))


def dense_bytes(tensor: Tensor) -> int:
    """Return the bytes of the numbers that a tensor has, those that it repeats once."""
    sizes = (n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    num = 1
    for size in sizes:
        num *= size
    return num * tensor.element_size()


def bytes_of(
    launch: Launch, name: str, tensor: Tensor, shape: StepShape, tiles: Tiles | None
) -> tuple[float, float]:
    """Return the bytes of an argument that are read and written, where it is either."""
    kernel, size = launch.kernel, tensor.element_size()
    if kernel in RECURRENCES and name in IN_PLACE:
        return bytes_of_states(launch, name, tensor, shape)
    if kernel == "attention_kernel" and name in ATTENDED:
        assert tiles is not None
        num = numbers_attended(launch, name, shape, tiles)
    elif (kernel, name) in NUMBERS:
        num = NUMBERS[kernel, name](launch, tensor, shape)
    else:
        num = dense_bytes(tensor) / size
    return num * size, num * size


def numbers_of_items(launch: Launch, _: Tensor, shape: StepShape) -> float:
    """Return the numbers of a schedule's items: of those without work one is written."""
    work = tiles_of(launch, shape)
    return ITEM_NUMBERS.value * len(work.items) + work.num_items - len(work.items)


def numbers_stored(launch: Launch, _: Tensor, shape: StepShape) -> float:
    """Return the numbers of keys, or values, that go into pages."""
    given = launch.arguments
    return float(shape.num_stored * given["NUM_KV_HEADS"] * given["HEAD_DIM"])


def numbers_of_head_norms(launch: Launch, tensor: Tensor, _: StepShape) -> float:
    """Return the numbers of norms of heads: a layer that reads another's keys has none of keys."""
    return tensor.numel() / (1 if launch.arguments["NUM_KV_HEADS"] else 2)


def numbers_of_experts(launch: Launch, tensor: Tensor, shape: StepShape) -> float:
    """Return the numbers of those experts that some token chose."""
    num_columns = launch.arguments["NUM"] * (2 if launch.arguments["IS_GATED"] else 1)
    return tensor.numel() * min(1.0, shape.num_experts * num_columns / len(tensor))


def numbers_of_real(_: Launch, tensor: Tensor, shape: StepShape) -> float:
    """Return the numbers of tokens that are no padding, which experts and states do without."""
    return tensor.numel() * shape.num_stored / shape.query_starts[-1]


def numbers_of_others(launch: Launch, tensor: Tensor, _: StepShape) -> float:
    """Return the numbers of all residuals but the first."""
    return tensor.numel() * (1 - 1 / launch.arguments["COUNT"])


def numbers_of_gates(launch: Launch, tensor: Tensor, _: StepShape) -> float:
    """Return the numbers of gates, and of what they are multiplied by where that is read."""
    has_sums_alone = launch.arguments["PART"] in (SUMS.value, SQUARES.value)
    return tensor.numel() / (2 if has_sums_alone else 1)


def numbers_of_rows(*parts: int) -> Callable[[Launch, Tensor, StepShape], float]:
    """Return what has a number for each row, in those parts of a launch that read it."""
    return lambda own, tensor, _: tensor.numel() if own.arguments["PART"] in parts else 0


NUMBERS: dict[tuple[str, str], Callable[[Launch, Tensor, StepShape], float]] = {
    ("inputs_kernel", "packed"): lambda _, tensor, shape: shape.num_packed,
    ("inputs_kernel", "drawn"): lambda _, tensor, shape: shape.num_drawn,
    ("inputs_kernel", "page_table"): lambda _, tensor, shape: shape.num_pages,
    ("moves_kernel", "packed"): lambda _, tensor, shape: 4 + 3 * len(shape.spans),
    ("schedule_kernel", "items"): numbers_of_items,
    ("rope_store_kernel", "keys"): numbers_stored,
    ("rope_store_kernel", "values"): numbers_stored,
    ("rope_store_kernel", "weights"): numbers_of_head_norms,
    ("sort_kernel", "pairs"): numbers_of_real,
    ("sum_kernel", "outputs"): numbers_of_real,
    ("router_kernel", "logits"): lambda own, x, _: len(x) * own.arguments["NUM_EXPERTS"],
    ("sum_kernel", "logits"): lambda own, x, _: len(x) if own.arguments["HAS_GATE"] else 0,
    ("spread_kernel", "residuals"): numbers_of_others,
    ("cut_gates_kernel", "gate_up"): numbers_of_gates,
    ("cut_gates_kernel", "means"): numbers_of_rows(SQUARES.value, GIVEN.value),
    ("cut_gates_kernel", "deviations"): numbers_of_rows(GIVEN.value),
    ("meet_inputs_kernel", "inputs"): lambda own, _, __: own.tensors["gates"].numel(),
    ("scale_kernel", "scales"): lambda _, __, shape: shape.num_experts,
    **{("delta_block_kernel", name): numbers_of_real for name in ("qkv", "betas", "steps")},
    **{("ssd_kernel", name): numbers_of_real for name in ("xbc", "dt")},
    **{("expert_kernel", name): numbers_of_real for name in ("pairs", "x", "x_scales", "out")},
    **{
        ("expert_kernel", name): numbers_of_experts
        for name in ("weight", "scales", "zeros", "bias")
    },
}


def numbers_attended(launch: Launch, name: str, shape: StepShape, tiles: Tiles) -> float:
    """Return how many numbers of an argument attention reads."""
    given = launch.arguments
    num_shared = sum(item[NUM_SHARING.value] > 1 for item in tiles.items)
    if name == "items":
        return 7 * len(tiles.items) + num_shared + 6 * (tiles.num_items - len(tiles.items))
    if name == "partial":
        return tiles.num_left * given["NUM_HEADS"] * (given["HEAD_DIM"] + TAIL.value - 2)
    keys = keys_once(tiles, given["BLOCK_KEYS"])
    if name == "page_table":
        num = shape.page_tokens
        return sum(-(-own.stop // num) - own.start // num for own in keys)
    num_kv_heads = given["NUM_HEADS"] // given["GROUP"]
    return sum(map(len, keys)) * num_kv_heads * given["HEAD_DIM"]


def keys_once(tiles: Tiles, block_keys: int) -> list[range]:
    """Return the keys of each sequence that any of its tiles loads, in whole blocks."""
    by_sequence: dict[int, range] = {}
    for item, keys in zip(tiles.items, tiles.keys, strict=True):
        first = keys.start // block_keys * block_keys
        known = by_sequence.get(item[SEQUENCE.value], range(first, keys.stop))
        joined = range(min(known.start, first), max(known.stop, keys.stop))
        by_sequence[item[SEQUENCE.value]] = joined
    return list(by_sequence.values())


def bytes_of_states(
    launch: Launch, name: str, tensor: Tensor, shape: StepShape
) -> tuple[float, float]:
    """Return what a recurrence or a convolution reads and writes of sequences' states."""
    given = launch.arguments
    spans = shape.spans
    if name == "states":
        of_each: float = dense_bytes(tensor[:1])
        if launch.kernel == "delta_block_kernel":
            of_each = FLOAT * given["VALUE_HEADS"] * given["KEY_DIM"] * given["VALUE_DIM"]
        elif launch.kernel == "ssd_kernel":
            of_each = FLOAT * given["NUM_HEADS"] * given["HEAD_DIM"] * given["STATE_SIZE"]
        return shape.num_states * of_each, len(spans) * of_each
    of_token = dense_bytes(tensor[:1]) / (BLOCK_TOKENS - 1)
    num_read = sum(first % BLOCK_TOKENS for first, _ in spans if first)
    return num_read * of_token, sum(end % BLOCK_TOKENS for _, end in spans) * of_token


def operations_of(launch: Launch, shape: StepShape, tiles: Tiles | None) -> float:
    """Return the floating-point operations of products: a product and a sum are two."""
    given = launch.arguments
    match launch.kernel:
        case "linear_kernel" | "fp8_kernel" | "int4_kernel":
            return 2.0 * len(launch.tensors["out"]) * given["NUM_COLUMNS"] * given["NUM_TERMS"]
        case "gated_linear_kernel":
            return 4.0 * len(launch.tensors["out"]) * given["NUM"] * given["NUM_TERMS"]
        case "expert_kernel":
            num = (4.0 if given["IS_GATED"] else 2.0) * len(launch.tensors["out"])
            return num * given["NUM"] * given["NUM_TERMS"]
        case "attention_kernel":
            window, is_chunked = given["WINDOW"] or None, given["IS_CHUNKED"]
            num_seen = sum(
                at + 1 - first_key_of(at, window, is_chunked)
                for first, end in shape.spans
                for at in range(first, end)
            )
            return 4.0 * num_seen * given["NUM_HEADS"] * given["HEAD_DIM"]
    return 0.0


def barriers_of(launch: Launch) -> int:
    """Return how often ranks wait for each other in a call of the all-reduce."""
    ends_with_one = launch.kernel == Algorithm.ONE_SHOT.value and launch.arguments["registered"]
    return BARRIERS[launch.kernel] + ends_with_one


def bytes_from_peers(launch: Launch) -> float:
    """Return what a rank reads of the others' memory in a call of the all-reduce."""
    num_bytes, world = launch.arguments["num_bytes"], launch.arguments["world"]
    of_all = float(num_bytes * (world - 1))
    return 2 * of_all / world if launch.kernel == Algorithm.TWO_SHOT.value else of_all
