"""The KV cache's pages: who has which. Pure bookkeeping; the memory is the workers'."""


class PagePool:
    """A free list of page numbers, newest freed first: their lines may still be in a cache."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages nobody has."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages hold `num_tokens`."""
        return -(-num_tokens // self.page_tokens)

    def can_take(self, num_pages: int) -> bool:
        """Whether `take` would succeed."""
        return num_pages <= len(self._free)

    def take(self, num_pages: int) -> list[int]:
        """Take pages off the free list; there must be enough."""
        assert self.can_take(num_pages), f"{num_pages} pages wanted, {len(self._free)} free"
        return [self._free.pop() for _ in range(num_pages)]

    def give_back(self, pages: list[int]) -> None:
        """Return pages to the free list."""
        self._free.extend(reversed(pages))
        assert len(self._free) <= self.num_pages, "a page was given back twice"
