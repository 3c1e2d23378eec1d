"""Weights that no file has: random ones, for a model of which there is only a config.

A number depends on the name of its weight and on its place, so that shares are parts of a whole.
"""

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor, Weight, Weights
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.engine_proc.worker.models.weight_shapes import is_one_plus, weight_shapes

DRAWN_BYTES = 32  # by a count of the generator
# The numbers of a byte: the odd multiples of 2^-13 up to 255, which bf16 has; 0.018 on average.
NUMBERS = (np.arange(-255, 256, 2) * np.float32(2**-13)).astype(np.float32)
BF16_NUMBERS = (NUMBERS.view(np.uint32) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class DummyWeight:
    """A `Weight` that is generated on every read."""

    key: int  # of the generator
    shape: tuple[int, ...]
    width: int  # columns of the whole
    first_row: int = 0
    first_column: int = 0
    format: Format = Format.BF16
    block_numbers: int = 1

    def rows(self, start: int, stop: int) -> "DummyWeight":
        shape = (stop - start, *self.shape[1:])
        return replace(self, shape=shape, first_row=self.first_row + start)

    def columns(self, start: int, stop: int) -> "DummyWeight":
        shape = (self.shape[0], stop - start)
        return replace(self, shape=shape, first_column=self.first_column + start)

    def stored(self) -> StoredTensor:
        """Draw whole rows of the whole, and cut them."""
        num_rows, row_draws = self.shape[0], -(-self.width // DRAWN_BYTES)
        generator = np.random.Philox(key=self.key, counter=self.first_row * row_draws)
        raw: npt.NDArray[np.uint64] = generator.random_raw(num_rows * row_draws * DRAWN_BYTES // 8)
        drawn = raw.view(np.uint8).reshape(num_rows, -1)
        num_columns = self.shape[1] if len(self.shape) > 1 else 1
        places = drawn[:, self.first_column : self.first_column + num_columns]
        numbers = BF16_NUMBERS.take(places, mode="wrap")  # the quickest mode; none are beyond
        return StoredTensor(self.format, self.shape, numbers.reshape(-1).view(np.uint8))

    def to_float32(self) -> npt.NDArray[np.float32]:
        return self.stored().to_float32()


def dummy_weights(spec: DecoderSpec) -> Weights:
    """Return weights for a decoder: norms that scale by 1, rates of -1, the rest random."""
    return {name: dummy(spec, name, shape) for name, shape in weight_shapes(spec).items()}


def dummy(spec: DecoderSpec, name: str, shape: tuple[int, ...]) -> Weight:
    """Return one weight."""
    if name.endswith("norm"):
        ones = np.full(shape, not is_one_plus(spec, name), np.float32)
        return StoredTensor(Format.F32, shape, ones.view(np.uint8))
    if name.endswith((".rate", ".decay")):  # of a state, which must not grow
        return StoredTensor(Format.F32, shape, np.full(shape, -1.0, np.float32).view(np.uint8))
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    width = shape[1] if len(shape) > 1 else 1
    return DummyWeight(int.from_bytes(digest, "little"), shape, width)
