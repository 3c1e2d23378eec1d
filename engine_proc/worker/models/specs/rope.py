"""RoPE tables from a model's config.

Frequencies are computed as transformers does, in fp32 where it uses fp32: positions multiply any
difference by thousands.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.models.specs.config_fields import ConfigFields
from headrace.engine_proc.worker.models.specs.decoder_spec import RopeTable
from headrace.errors import ModelError
from headrace.model import longrope

MAX_HEAD_DIM = 1 << 16  # a config that says more is corrupt, and its table would fill the memory

Floats = npt.NDArray[np.float32]


def rope_table(
    params: Mapping[str, Any],
    *,
    owner: str,
    head_dim: int,
    max_position: int,
    theta: float,
    partial: float | None = None,
    interleaved: bool = False,
) -> RopeTable:
    """Make the table of one kind of layer.

    Args:
        params: `rope_parameters` as transformers 5 writes it, or the older `rope_scaling`.
        theta: the base, where `params` has none of its own.
        partial: the share of head_dim that is rotated, if the family has that at all.
    Raises:
        ModelError: heads that no model has, or an unknown kind or field of scaling. `dynamic`
            depends on the length of the sequence, so no table can hold it. So does `longrope`,
            whose table is that of texts within the trained length (`longrope.trained_length`).
    """
    if head_dim > MAX_HEAD_DIM:
        raise ModelError(f"{owner} has heads of {head_dim} numbers; the most is {MAX_HEAD_DIM}")
    fields = ConfigFields(params, f"the RoPE of {owner}")
    fields.read |= {"type", "rope_type"}
    kind = "rope_type" if params.get("rope_type") is not None else "type"
    scaling: Scaling = fields.choice(kind, SCALINGS, "default")
    share = fields.number("partial_rotary_factor", partial or 1.0)
    if partial is None and share != 1:
        raise fields.wrong("partial_rotary_factor", "1")
    theta = fields.number("rope_theta", theta)
    if not theta > 1:
        raise fields.wrong("rope_theta", "a number above 1")
    base = Base(
        theta=theta,
        rotary_dim=int(head_dim * share),
        head_dim=head_dim,
        max_position=max_position,
    )
    with np.errstate(over="ignore"):
        inv_freq, scale = scaling(fields, base)
    if not np.isfinite(inv_freq).all():
        raise fields.wrong("factor", "one whose frequencies are numbers")
    fields.refuse_unread()
    return RopeTable(inv_freq=tuple(inv_freq.tolist()), scale=scale, interleaved=interleaved)


@dataclass(frozen=True)
class Base:
    """RoPE without scaling."""

    theta: float
    rotary_dim: int
    head_dim: int
    max_position: int

    def powers(self) -> Floats:
        """theta ** (2 i / rotary_dim), [rotary_dim / 2], each rounded once to fp32."""
        exponents = np.arange(0, self.rotary_dim, 2, dtype=np.float32) / np.float32(self.rotary_dim)
        return np.power(self.theta, exponents.astype(np.float64)).astype(np.float32)

    def inv_freq(self) -> Floats:
        return np.float32(1) / self.powers()


Scaling = Callable[[ConfigFields, Base], tuple[Floats, float]]


def default(fields: ConfigFields, base: Base) -> tuple[Floats, float]:
    """The original, unscaled."""
    return base.inv_freq(), 1.0


def linear(fields: ConfigFields, base: Base) -> tuple[Floats, float]:
    """Positions are divided by a factor."""
    return base.inv_freq() / np.float32(fields.positive("factor")), 1.0


def proportional(fields: ConfigFields, base: Base) -> tuple[Floats, float]:
    """A part of the pairs rotates, at the frequencies that they have among all of the head's."""
    exponents = np.arange(0, base.head_dim, 2, dtype=np.float32) / np.float32(base.head_dim)
    powers = np.power(base.theta, exponents.astype(np.float64)).astype(np.float32)
    inv_freq = np.float32(1) / powers / np.float32(fields.positive("factor", 1.0))
    inv_freq[base.rotary_dim // 2 :] = 0
    return inv_freq, 1.0


def llama3(fields: ConfigFields, base: Base) -> tuple[Floats, float]:
    """Long wavelengths are stretched by a factor, short ones kept, those between blended.

    Llama 4 Scout blends none: its two factors are equal.
    """
    factor = fields.positive("factor")
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    trained = fields.number("original_max_position_embeddings", base.max_position)
    inv_freq = base.inv_freq().astype(np.float64)
    turns = trained * inv_freq / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1) if high != low else turns > low
    return ((1 - kept) * inv_freq / factor + kept * inv_freq).astype(np.float32), 1.0


def yarn(fields: ConfigFields, base: Base) -> tuple[Floats, float]:
    """Pairs that turn rarely within the trained length are stretched, fast ones kept."""
    factor = fields.positive("factor")
    trained = fields.positive("original_max_position_embeddings", base.max_position)
    dim = base.rotary_dim

    def pair_turning(turns: float) -> float:
        """The pair, counted in fractions, that turns so often within the trained length."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base.theta))

    first = pair_turning(fields.positive("beta_fast", 32))
    last = pair_turning(fields.positive("beta_slow", 1))
    if fields.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    stretched = np.clip((np.arange(dim // 2) - first) / (last - first), 0, 1)
    powers = base.powers().astype(np.float64)
    inv_freq = stretched / (factor * powers) + (1 - stretched) / powers
    return inv_freq.astype(np.float32), yarn_scale(fields, factor)


def yarn_scale(fields: ConfigFields, factor: float) -> float:
    """The scale of cos and sin: given outright, or from the factor, or as DeepSeek derives it."""

    def grown(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    given = fields.optional_number("attention_factor")
    mscale, all_dim = fields.number("mscale", 0), fields.number("mscale_all_dim", 0)
    if given is not None:
        return given
    if mscale and all_dim:
        return grown(mscale) / grown(all_dim)
    return grown(1)


def short_longrope(fields: ConfigFields, base: Base) -> tuple[Floats, float]:
    """Each pair has a divisor of its own: here those of texts within the trained length.

    The scale is given outright, as `short_mscale` (PhiMoE), or from how much longer texts may be.
    """
    fields.read |= {"long_factor", "long_mscale"}
    trained = fields.integer(longrope.LENGTH)
    if trained == 1:
        raise fields.wrong(longrope.LENGTH, "2 or more")
    divisors = fields.get("short_factor")
    powers = base.powers()
    if not isinstance(divisors, list) or len(divisors) != len(powers):
        raise fields.wrong("short_factor", f"a list of {len(powers)} numbers")
    each = ConfigFields({str(i): divisor for i, divisor in enumerate(divisors)}, "'short_factor'")
    by_pair = np.array([each.positive(name) for name in each.values], np.float32)
    inv_freq = np.float32(1) / (by_pair * powers)
    given = fields.optional_number("short_mscale")
    if given is None:
        given = fields.optional_number("attention_factor")
    factor = fields.positive("factor", base.max_position / trained)
    grown = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return inv_freq, grown if given is None else given


SCALINGS: dict[str, Scaling] = {
    "default": default,
    "linear": linear,
    longrope.KIND: short_longrope,
    "llama3": llama3,
    "proportional": proportional,
    "yarn": yarn,
}
