"""Opens an adapter for a model: its tensors become weights, each worker takes its share."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from headrace.config.process_configs import ExecutionConfig
from headrace.engine_proc.worker.adapters.expert_factors import ExpertStacks
from headrace.engine_proc.worker.adapters.factors import AdapterRefused, Factors
from headrace.engine_proc.worker.adapters.gguf_adapter import read_gguf
from headrace.engine_proc.worker.adapters.low_rank import LowRank, Numbers
from headrace.engine_proc.worker.adapters.peft_folder import read_peft
from headrace.engine_proc.worker.checkpoints.weights import StoredTensor, Weight, Weights
from headrace.engine_proc.worker.models.folder_names import hugging_face
from headrace.engine_proc.worker.models.gguf_architectures import ARCHITECTURES
from headrace.engine_proc.worker.models.gguf_names import gguf
from headrace.engine_proc.worker.models.model import DecoderModel
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.engine_proc.worker.models.weight_names import decoder_name
from headrace.engine_proc.worker.models.weight_shapes import weight_shapes
from headrace.engine_proc.worker.models.weight_source import WeightSource
from headrace.engine_proc.worker.parallel.shard import Shard, shard_spec, share_of

WHOLE = ("embed", "head")  # may come in place of the base's
DECODED_NUMBERS = 1 << 20  # of a base weight at a time


@dataclass(frozen=True)
class AdaptedModel:
    """The model that adapters are for; `weights` are the whole model's."""

    spec: DecoderSpec
    weights: Weights
    is_gguf: bool
    max_rank: int
    shard: Shard | None = None  # of this worker; None has all

    @classmethod
    def of(
        cls, config: ExecutionConfig, model: DecoderModel, shard: Shard | None = None
    ) -> "AdaptedModel":
        """Return a worker's model as adapters see it."""
        is_gguf = config.model_path.endswith(".gguf")
        return cls(model.spec, model.weights, is_gguf, config.max_lora_rank, shard)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of weights."""
        return shapes_of(self.spec)

    @cached_property
    def own_shapes(self) -> dict[str, tuple[int, ...]]:
        """The same of this worker's share."""
        return self.shapes if self.shard is None else shapes_of(shard_spec(self.spec, self.shard))

    @property
    def permutes(self) -> bool:
        """Whether rows of queries and keys are in the order of Llama's GGUF files."""
        architecture = ARCHITECTURES.get(self.spec.architecture)
        return self.is_gguf and architecture is not None and architecture.permuted


def open_adapter(path: Path, model: AdaptedModel) -> dict[str, LowRank]:
    """Return what an adapter adds, by weight; of several workers, to this one's share.

    Raises:
        AdapterRefused: it is broken, does not fit the model, or cannot be expressed.
    """
    is_gguf = path.suffix == ".gguf"
    factors = read_gguf(path) if is_gguf else read_peft(path, ExpertStacks.of(model.spec))
    if not factors:
        raise AdapterRefused(f"{path}: has no tensors")
    if is_gguf and not model.is_gguf:
        raise AdapterRefused(f"{path}: is for GGUF models; this model is a folder")
    for name, own in factors.items():
        check(path, name, own, model.max_rank)
    decoder = {decoder_name(name): own for name, own in factors.items()}
    tensors = {name: own.b for name, own in decoder.items()}
    naming = gguf if is_gguf else hugging_face
    sources: dict[str, dict[str, WeightSource]] = {}  # by tensor
    spec = replace(model.spec, num_mtp_layers=0)  # adapters have nothing around such a layer
    for weight, source in naming(spec, tensors).items():
        sources.setdefault(source.tensor, {})[weight] = source
    low_ranks: dict[str, LowRank] = {}
    for name, own in decoder.items():
        parts = parts_of(sources.get(name, {}), model)
        if is_gguf:
            parts.pop("embed", None)  # llama.cpp's tools write none
        module = name.removesuffix(".weight")
        check_parts(path, module, own, parts, model.spec)
        low_ranks |= fitted(path, module, own, parts, model, is_gguf)
    return low_ranks


def check(path: Path, tensor: str, factors: Factors, max_rank: int) -> None:
    """Refuse factors that are no matrices of one rank, or of a higher one than is served."""
    if factors.a is None:
        return
    module = tensor.removesuffix(".weight")
    a, b = factors.a.shape, factors.b.shape
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] == 0:
        raise AdapterRefused(
            f"{path}: {module} has lora_A of shape {list(a)} and lora_B of {list(b)}, which are no "
            "[rank, in] and [out, rank]"
        )
    if a[0] > max_rank:
        raise AdapterRefused(f"{path}: {module} has rank {a[0]}; --max-lora-rank is {max_rank}")


def parts_of(sources: Mapping[str, WeightSource], model: AdaptedModel) -> dict[str, WeightSource]:
    """Return the weights that a module holds, of those in its tensor: several of a fused one."""
    return {
        name: source for name, source in sources.items() if len(model.shapes.get(name, ())) == 2
    }


def check_parts(
    path: Path, module: str, factors: Factors, parts: Iterable[str], spec: DecoderSpec
) -> None:
    """Refuse factors of weights that cannot have them."""
    for part in parts:
        if "router" in part.split("."):
            raise AdapterRefused(
                f"{path}: {module} is a router, which adapters cannot change here; merge the "
                "adapter into the weights"
            )
        if "altup" in part.split("."):
            raise AdapterRefused(
                f"{path}: {module} is of AltUp, which adapters cannot change here; merge the "
                "adapter into the weights"
            )
        if factors.a is None and part not in WHOLE:
            raise AdapterRefused(
                f"{path}: modules_to_save has {module}; only the embedding and the head can be "
                "whole; merge the adapter into the weights"
            )
        if part == "embed" and (
            factors.magnitude is not None or factors.b.shape[1] > spec.hidden_size
        ):
            raise AdapterRefused(
                f"{path}: {module} is an embedding; it can have no DoRA, and no rank above the "
                f"hidden size {spec.hidden_size}"
            )
    if not parts:
        raise AdapterRefused(
            f"{path}: {module} is no linear layer of this {spec.architecture} model that an "
            "adapter can change"
        )


def shapes_of(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of weights; the head has one, tied or not."""
    shapes = weight_shapes(spec)
    return {"head": shapes["embed"], **shapes}


def fitted(
    path: Path,
    module: str,
    factors: Factors,
    parts: Mapping[str, WeightSource],
    model: AdaptedModel,
    is_gguf: bool,
) -> dict[str, LowRank]:
    """Return the factors of a module's weights, of those that this worker has."""
    shapes = model.shapes
    num_rows = sum(shapes[name][0] for name in parts)
    num_cols = next(shapes[name][1] for name in parts)
    a, b, magnitude = factors.a, factors.b, factors.magnitude
    wrong = magnitude is not None and magnitude.shape != (num_rows,)
    given = b.shape if a is None else (b.shape[0], a.shape[1])
    if given != (num_rows, num_cols) or wrong:
        raise AdapterRefused(
            f"{path}: {module} is {list(given)} in the adapter, and "
            f"[{num_rows}, {num_cols}] in the model"
        )
    low_ranks = {}
    for name, source in parts.items():
        own_b = source.weight_of(b, shapes[name][0])
        own_magnitude = None
        if magnitude is not None:
            column = StoredTensor(magnitude.format, (num_rows, 1), magnitude.data)
            own_magnitude = source.weight_of(column, shapes[name][0]).to_float32()[:, 0]
        if model.permutes and not is_gguf and name.rpartition(".")[2] in ("q", "k"):
            order = gguf_order(shapes[name][0], model.spec.head_dim)
            own_b = StoredTensor.of(own_b.to_float32()[order])
            own_magnitude = None if own_magnitude is None else own_magnitude[order]
        if name in model.own_shapes:
            low_ranks[name] = share(name, a, own_b, factors.scale, own_magnitude, model)
    return low_ranks


def share(
    name: str,
    a: Weight | None,
    b: Weight,
    scale: float,
    magnitude: Numbers | None,
    model: AdaptedModel,
) -> LowRank:
    """Return a worker's share: columns of `a`, or rows of `b` and of the gain, as the weight's.

    What comes in place of the base's weight becomes what is added to it.
    """
    gain = None
    base = model.weights["embed" if name not in model.weights else name]
    if a is None:
        b = StoredTensor.of(b.to_float32() - base.to_float32())
    elif magnitude is not None:
        gain = magnitude / row_norms(base, a.to_float32(), scale * b.to_float32())
    if model.shard is not None:
        whole, own = model.shapes[name], model.own_shapes[name]
        if own[1] != whole[1]:
            assert a is not None, "an embedding and a head have all columns"
            a = share_of(model.spec, name, a, model.shard)
        elif own[0] != whole[0]:
            b = share_of(model.spec, name, b, model.shard)
            if gain is not None:
                column = StoredTensor.of(gain[:, None])
                gain = share_of(model.spec, name, column, model.shard).to_float32()[:, 0]
    return LowRank(a, b, scale, gain)


def row_norms(base: Weight, a: Numbers, b: Numbers) -> Numbers:
    """Return the norm of each row of `base + b a`."""
    num_rows, num_cols = base.shape
    step = max(1, DECODED_NUMBERS // num_cols)
    norms = np.empty(num_rows, np.float32)
    for first in range(0, num_rows, step):
        last = min(first + step, num_rows)
        rows = base.rows(first, last).to_float32() + b[first:last] @ a
        norms[first:last] = np.linalg.norm(rows, axis=1)
    return norms


def gguf_order(num_rows: int, head_dim: int) -> "np.typing.NDArray[np.intp]":
    """Return, for each row of a Llama's queries or keys in a GGUF file, its row in a folder."""
    return np.arange(num_rows).reshape(-1, 2, head_dim // 2).swapaxes(1, 2).reshape(-1)
