"""Allocates KV cache pages (vLLM's blocks) and finds cached prefixes. Pure.

The pool does bookkeeping only: the memory belongs to the workers. Prefix cache: the hash of a full
page covers its tokens and the hash of the page before, so prompts share their common pages. A page
without users keeps its contents until it is allocated again. Eviction is least recently used first.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable

from headrace.engine_proc.kv_cache.cache_table import NO_CACHE, CacheTable
from headrace.engine_proc.kv_cache.kv_event_log import KvEventLog
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.ipc.prefix_index import PrefixIndex


class PagePool:
    """Every page is free (empty), idle (cached, without users) or used by sequences.

    Args:
        page_tokens: tokens per page.
        table: of the pages. What it has is cached from the start.
        index: tells tokenizers what is cached.
        events: where to note what can be found, if that is published.

    Attributes:
        on_cached: called with the digest of each page that can be found from then on.
    """

    def __init__(
        self,
        num_pages: int,
        page_tokens: int,
        table: CacheTable | None = None,
        index: PrefixIndex | None = None,
        events: KvEventLog | None = None,
    ) -> None:
        self.events = events
        self.on_cached: Callable[[bytes], None] = lambda _: None
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._table = table or CacheTable(num_pages)
        self._digests: dict[int, bytes] = dict(self._table.adopt())
        self._pages: dict[bytes, int] = {digest: page for page, digest in self._digests.items()}
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(self._digests)  # the first goes
        self._free = [page for page in range(num_pages - 1, -1, -1) if page not in self._idle]
        self._num_users = [0] * num_pages
        self._index = index
        if index is not None:
            index.clear()
            for digest in self._pages:
                index.add(digest)

    @property
    def cache_id(self) -> bytes:
        """What names the memory of the pages; `NO_CACHE` where it dies with the workers."""
        return self._table.cache_id

    @property
    def num_cached(self) -> int:
        """Full pages that can be found, in use or not."""
        return len(self._digests)

    @property
    def num_free(self) -> int:
        """Pages that can be allocated, the idle ones included."""
        return len(self._free) + len(self._idle)

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages hold `num_tokens`."""
        return -(-num_tokens // self.page_tokens)

    def can_allocate(self, num_pages: int) -> bool:
        """Whether `allocate` would succeed."""
        return num_pages <= self.num_free

    def allocate(self, num_pages: int) -> "array[int]":
        """Allocate pages to write to; there must be enough."""
        assert self.can_allocate(num_pages), f"{num_pages} pages wanted, {self.num_free} free"
        pages = array("i")
        for _ in range(num_pages):
            pages.append(self._free.pop() if self._free else self._evict())
        for page in pages:
            self._num_users[page] = 1
        return pages

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._table.erase(page)
        digest = self._digests.pop(page)
        del self._pages[digest]
        if self._index is not None:
            self._index.remove(digest)
        if self.events is not None:
            self.events.remove(digest)
        return page

    def match_prefix(self, digests: list[bytes]) -> "array[int]":
        """Return the cached pages that begin a prompt, for reading; they count as in use."""
        pages = array("i")
        for digest in digests:
            page = self._pages.get(digest)
            if page is None:
                break
            if not self._num_users[page]:
                del self._idle[page]
                self._table.take(page)
            self._num_users[page] += 1
            pages.append(page)
        return pages

    def has(self, digest: bytes) -> bool:
        """Whether a page of this digest is cached."""
        return digest in self._pages

    def count_cached(self, digests: list[bytes]) -> int:
        """Return how many pages `match_prefix` would find."""
        for count, digest in enumerate(digests):
            if digest not in self._pages:
                return count
        return len(digests)

    def cache(self, page: int, digest: bytes) -> bool:
        """Register what a full page in use holds, unless another does; return whether it is new."""
        if digest in self._pages:
            return False
        self._pages[digest] = page
        self._digests[page] = digest
        self._table.record(page, digest)
        if self._index is not None:
            self._index.add(digest)
        self.on_cached(digest)
        return True

    def cache_of(self, sequence: Sequence, place: int, page: int) -> None:
        """Register a full page in use by a sequence, of which it is the page at a place."""
        if self.cache(page, sequence.digests[place]) and self.events is not None:
            self.events.store(sequence, place)

    def free(self, pages: "array[int]") -> None:
        """Free a sequence's pages. Its last page is the first to be evicted: prefixes stay."""
        for page in reversed(pages):
            self._num_users[page] -= 1
            assert self._num_users[page] >= 0, "a page was freed twice"
            if self._num_users[page]:
                continue
            if page in self._digests:
                self._idle[page] = None
                self._table.leave(page)
            else:
                self._free.append(page)

    def reset(self, cache_id: bytes = NO_CACHE) -> None:
        """Empty the prefix cache after the loss of the workers' memory. No page may be in use.

        Args:
            cache_id: of the memory that the workers have now.
        """
        assert not any(self._num_users), "pages are in use"
        self._table.begin(cache_id)
        self._free += self._idle
        self._idle.clear()
        self._digests.clear()
        self._pages.clear()
        if self._index is not None:
            self._index.clear()
        if self.events is not None:
            self.events.clear()
