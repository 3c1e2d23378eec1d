"""A vector in the types that APIs have: numbers, bytes of them, or a bit for each.

Whole numbers are of vectors whose numbers lie between -1 and 1; others are cut off.
"""

import base64
from array import array
from typing import assert_never

from headrace.ipc.messages import EmbeddingType

Typed = str | list[float | int]


def typed(vector: "array[float]", kind: EmbeddingType) -> Typed:
    """Return a vector as `kind`."""
    match kind:
        case "float":
            return [*vector]
        case "base64":
            return base64.b64encode(vector.tobytes()).decode()
        case "int8":
            return [in_8_bits(number) for number in vector]
        case "uint8":
            return [in_8_bits(number) + 128 for number in vector]
        case "ubinary":
            return list(bits_of(vector))
        case "binary":
            return [byte - 128 for byte in bits_of(vector)]
        case _:
            assert_never(kind)


def in_8_bits(number: float) -> int:
    """Return a number in 8 bits: 127 is 1."""
    return max(-128, min(127, round(127 * number)))


def bits_of(vector: "array[float]") -> bytes:
    """Return a bit for each number, 1 above 0, the first one highest; the end is filled with 0."""
    bits = "".join("1" if number > 0 else "0" for number in vector)
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[at : at + 8], 2) for at in range(0, len(bits), 8))
