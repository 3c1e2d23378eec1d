"""What the prefix cache gains and loses, in vLLM's format, for routers that follow it. Pure.

A block is a page; its hash is the page's digest.
"""

import msgspec

from headrace.engine_proc.sequence.sequence import Sequence

MEDIUM = "CPU"  # where pages are


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A full page can be found. Fields are in vLLM's order."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str = MEDIUM


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A page can be found no more."""

    block_hashes: list[bytes]
    medium: str = MEDIUM


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """No page can be found. Those that an engine has from the one before it are not told again."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventLog:
    """The events since they were last taken; the first of an engine clears all.

    Args:
        page_tokens: tokens of a page.
    """

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._events: list[KvEvent] = [AllBlocksCleared()]

    def store(self, sequence: Sequence, page: int) -> None:
        """Note that a page of a sequence, by its place there, can be found."""
        start = page * self._page_tokens
        parent = sequence.digests[page - 1] if page else None
        tokens = sequence.tokens[start : start + self._page_tokens].tolist()
        digest = sequence.digests[page]
        self._events.append(BlockStored([digest], parent, tokens, self._page_tokens))

    def remove(self, digest: bytes) -> None:
        """Note that a page was evicted."""
        self._events.append(BlockRemoved([digest]))

    def clear(self) -> None:
        """Note that all pages are lost."""
        self._events = [AllBlocksCleared()]

    def take(self) -> list[KvEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events
