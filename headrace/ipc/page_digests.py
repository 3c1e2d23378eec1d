"""Digests of pages: what the prefix cache finds them by. Pure."""

from array import array
from collections.abc import Mapping
from hashlib import blake2b
from types import MappingProxyType

DIGEST_BYTES = 16  # collisions would mix conversations: 64 bits would not do
NO_MARKS: Mapping[int, bytes] = MappingProxyType({})


def chain_digests(
    digests: list[bytes],
    tokens: "array[int]",
    page_tokens: int,
    end: int,
    salt: bytes = b"",
    marks: Mapping[int, bytes] = NO_MARKS,
) -> None:
    """Extend `digests`, one per full page of `tokens`, to the first `end` pages.

    Args:
        salt: begins the chain; chains with different salts share nothing.
        marks: by page, further content to hash, as of images.
    """
    for page in range(len(digests), end):
        content = tokens[page * page_tokens : (page + 1) * page_tokens].tobytes()
        before = digests[-1] if digests else salt
        content += marks.get(page, b"")
        digests.append(blake2b(before + content, digest_size=DIGEST_BYTES).digest())
