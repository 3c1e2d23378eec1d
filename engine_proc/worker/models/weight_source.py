"""Where a weight is in a file."""

from typing import NamedTuple


class WeightSource(NamedTuple):
    """The source of a weight: rows of a tensor of the file, from `first_row` on."""

    tensor: str
    first_row: int = 0
