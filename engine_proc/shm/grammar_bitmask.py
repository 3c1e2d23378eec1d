"""Bitmasks of the tokens that grammars allow, in shared memory: from the engine to its workers.

An inherited memfd of masks, one bit per token of the vocabulary, lowest bit first. The engine
writes the masks of a step while the workers compute it, then sends `Masks`.
"""

import ctypes
import mmap
import os

WORD_BYTES, WORD_BITS = 4, 32


class GrammarBitmask:
    """One end of the area; which end is a matter of use.

    Args:
        fd: made by `create`.
        vocab_size: tokens that a mask covers.
    """

    def __init__(self, fd: int, vocab_size: int) -> None:
        self.fd = fd
        self.vocab_size = vocab_size
        self.num_words = -(-vocab_size // WORD_BITS)  # of each mask, u32
        self.mask_bytes = WORD_BYTES * self.num_words
        self.buffer = mmap.mmap(fd, 0)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))

    @classmethod
    def create(cls, num_masks: int, vocab_size: int) -> "GrammarBitmask":
        """Make an area of `num_masks`. It takes only the memory that is written."""
        fd = os.memfd_create("headrace-masks", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, num_masks * WORD_BYTES * -(-vocab_size // WORD_BITS))
            return cls(fd, vocab_size)
        except (OSError, ValueError, OverflowError):
            os.close(fd)
            raise

    def address(self, row: int) -> int:
        """Return where a mask begins in this process."""
        assert 0 <= row < len(self.buffer) // self.mask_bytes
        return self._base + row * self.mask_bytes

    def allow_only(self, row: int, allowed: bytes) -> bool:
        """Intersect a mask with `allowed`, a mask of the same form.

        A mask that is cut short has no tokens beyond its end. Returns whether a token is left.
        """
        start = row * self.mask_bytes
        mask = int.from_bytes(self.buffer[start : start + self.mask_bytes], "little")
        mask &= int.from_bytes(allowed, "little")
        self.buffer[start : start + self.mask_bytes] = mask.to_bytes(self.mask_bytes, "little")
        return mask != 0

    def allow_all(self, row: int) -> None:
        """Write a mask that bans nothing."""
        ctypes.memset(self.address(row), 0xFF, self.mask_bytes)
