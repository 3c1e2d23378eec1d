"""Factors of stacks that hold a matrix of every expert, taken apart as `expert_stacks` does."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from headrace.engine_proc.worker.adapters.factors import AdapterRefused, Factors
from headrace.engine_proc.worker.checkpoints.expert_stacks import (
    GATE_UP,
    NUMBER_TYPES,
    StridedWeight,
)
from headrace.engine_proc.worker.checkpoints.weights import StoredTensor, Weight
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec

WRAPPED = ".base_layer"
MODULES = (".experts", "block_sparse_moe.input_linear", "block_sparse_moe.output_linear")
# Their parameters, in the order in which they have them.
PARAMETERS = ("gate_up_proj", "up_proj", "weight", "down_proj")


@dataclass(frozen=True)
class ExpertStacks:
    """What the stacks of a model's experts are like."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    alternates: bool  # rows of gate and up, of one expert

    @classmethod
    def of(cls, spec: DecoderSpec) -> "ExpertStacks":
        """Return those of a model; it may have no experts."""
        mixtures = (layer.mixture for layer in spec.layers if layer.mixture is not None)
        mixture = next(mixtures, None)
        counts = (0, 0) if mixture is None else (mixture.num_experts, mixture.intermediate_size)
        num_experts, size = counts
        return cls(num_experts, spec.hidden_size, size, spec.architecture == "gpt_oss")

    def shape_of(self, name: str) -> tuple[int, int]:
        """Return the shape of an expert's matrix, [out, in]."""
        if name.endswith("down_proj"):
            return self.hidden_size, self.intermediate_size
        return self.intermediate_size * (2 if name.endswith(GATE_UP) else 1), self.hidden_size


NO_STACKS = ExpertStacks(0, 0, 0, alternates=False)


def parameter_of(module: str, targets: Collection[str]) -> str | None:
    """Return the parameter that PEFT's wrapper of a module is for; None if it is for the module.

    PEFT wraps a module once for each of its parameters among `targets`. The first is innermost.
    """
    own, depth = module, 0
    while own.endswith(WRAPPED):
        own, depth = own.removesuffix(WRAPPED), depth + 1
    if not own.endswith(MODULES):
        return None
    ends = tuple(f".{target}" for target in targets)
    names = (f"{own}.{parameter}" for parameter in reversed(PARAMETERS))
    wrapped = [name for name in names if f".{name}".endswith(ends)]
    return wrapped[depth] if depth < len(wrapped) else None


def of_parameters(found: Mapping[str, Factors], stacks: ExpertStacks) -> dict[str, Factors]:
    """Return PEFT's factors of stacks by expert. Those of square matrices are as all others.

    Raises:
        AdapterRefused: as `of_parameter`, or all matrices are square, or there are no experts; the
            text names no file.
    """
    if found and not stacks.num_experts:
        raise AdapterRefused(
            f"{min(found)} is a stack of experts, which no adapter can change in this model; merge "
            "the adapter into the weights"
        )
    known = {are_transposed(name, factors, stacks) for name, factors in found.items()} - {None}
    parts: dict[str, Factors] = {}
    for name, factors in found.items():
        is_transposed = are_transposed(name, factors, stacks)
        if is_transposed is None and len(known) != 1:
            raise AdapterRefused(
                f"{name} has square matrices, and no other stack tells whether they are "
                "transposed; merge the adapter into the model"
            )
        if is_transposed is None:
            (is_transposed,) = known
        parts |= of_parameter(name, factors, stacks, bool(is_transposed))
    return parts


def are_transposed(name: str, factors: Factors, stacks: ExpertStacks) -> bool | None:
    """Whether factors are of transposed matrices, as PEFT does not know all stacks that have those.

    The result is None of square ones, which do not tell.
    """
    shape = stacks.shape_of(name)
    assert factors.a is not None
    if shape[0] == shape[1]:
        return None
    return (factors.b.shape[0], factors.a.shape[-1]) == shape[::-1]


def of_parameter(
    name: str, factors: Factors, stacks: ExpertStacks, is_transposed: bool
) -> dict[str, Factors]:
    """Return PEFT's factors of a stack by expert.

    Those of `lora_A` are rows, expert after expert; columns of `lora_B` take turns.

    Raises:
        AdapterRefused: they are no factors of so many experts; the text names no file.
    """
    count = stacks.num_experts
    assert factors.a is not None
    if len(factors.a.shape) != 2 or len(factors.b.shape) != 2:
        return {name: factors}  # is refused as that of any layer
    if factors.a.shape[0] % count or factors.a.shape[0] != factors.b.shape[1]:
        raise AdapterRefused(
            f"{name} has lora_A of shape {list(factors.a.shape)} and lora_B of "
            f"{list(factors.b.shape)}, which are not those of {count} experts"
        )
    a, b = plain(factors.a), plain(factors.b)
    alternates = stacks.alternates and name.endswith(GATE_UP)
    rank = a.shape[0] // count
    parts: dict[str, Factors] = {}
    for expert in range(count):
        own_a, own_b = a.numbers[expert * rank :][:rank], b.numbers[:, expert::count]
        if is_transposed:
            own_a, own_b = own_b.T, own_a.T
        turns = {"[0::2]": own_b[::2], "[1::2]": own_b[1::2]} if alternates else {"": own_b}
        for turn, rows in turns.items():
            parts[f"{name}[{expert}]{turn}"] = replace(
                factors,
                a=StridedWeight(a.format, own_a),
                b=StridedWeight(b.format, rows),
            )
    return parts


def plain(factors: Weight) -> StridedWeight:
    """Return a matrix of numbers that are no blocks, and no 8-bit floats."""
    stored = factors.stored()
    if stored.format not in NUMBER_TYPES:
        stored = StoredTensor.of(stored.to_float32())
    numbers = stored.data.view(NUMBER_TYPES[stored.format]).reshape(stored.shape)
    return StridedWeight(stored.format, numbers)


def of_tensor(name: str, factors: Factors) -> dict[str, Factors]:
    """Return llama.cpp's factors of a tensor; of one with three dimensions, by expert."""
    a, b = factors.a, factors.b
    if a is None or len(a.shape) != 3 or len(b.shape) != 3 or a.shape[0] != b.shape[0]:
        return {name: factors}
    return {
        f"{name}[{expert}]": replace(factors, a=matrix(a, expert), b=matrix(b, expert))
        for expert in range(a.shape[0])
    }


def matrix(stack: Weight, expert: int) -> StoredTensor:
    """Return the matrix of an expert."""
    own = stack.rows(expert, expert + 1).stored()
    return replace(own, shape=own.shape[1:])
