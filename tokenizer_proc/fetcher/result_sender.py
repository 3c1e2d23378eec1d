"""Answers to tokenizer processes: files go through an arena, of which this process owns the one
region. The receiver of a file reads it at once, and acknowledges it there.
"""

import asyncio
from collections.abc import Sequence

from headrace.board.board import Board
from headrace.board.replacements import ReplacementWatch
from headrace.ipc.arena import Region
from headrace.ipc.fetcher_messages import Fetch, Fetched
from headrace.ipc.messages import Tensor
from headrace.ipc.sockets import Outbox, address
from headrace.tokenizer_proc.fetcher.download import DownloadedFile

POLL_INTERVAL_S = 0.002  # between looks at what has been read


class FetchResultSender:
    """The outgoing links of the fetcher, and files that have not been read."""

    def __init__(self, run_dir: str, region: Region, board: Board) -> None:
        num_tokenizers = len(list(board.of("tokenizer")))
        self._links = [Outbox(address(run_dir, "fetched", i)) for i in range(num_tokenizers)]
        self._region = region
        self._watch = ReplacementWatch(board, ("tokenizer",))
        self._places: dict[int, int] = {}  # the reader's index, by place

    async def send(self, fetch: Fetch, files: Sequence[DownloadedFile]) -> None:
        """Answer with the files of a request, as soon as there is room."""
        sizes = [len(file.data) for file in files]
        self._sweep()
        while (places := self._region.allocate_all(sizes)) is None:
            await asyncio.sleep(POLL_INTERVAL_S)
            self._sweep()
        tensors = []
        for place, file in zip(places, files, strict=True):
            self._region.view(place)[: len(file.data)] = file.data
            self._region.send(place)
            self._places[place] = fetch.tokenizer
            tensors.append(Tensor(place, self._region.generation(place), "u1", [len(file.data)]))
        await self._send(fetch, Fetched(fetch.id, tensors, [file.mime_type for file in files]))

    async def refuse(self, fetch: Fetch, place: int, why: str) -> None:
        """Answer that one of the URLs is not fetched."""
        await self._send(fetch, Fetched(fetch.id, failed=place, why=why))

    def close(self) -> None:
        """Close all links."""
        for link in self._links:
            link.close()

    async def _send(self, fetch: Fetch, message: Fetched) -> None:
        while not self._links[fetch.tokenizer].try_send(message):
            await asyncio.sleep(POLL_INTERVAL_S)

    def _sweep(self) -> None:
        """Free files that have been read, and those whose reader has died."""
        lost = {seat.index for seat in self._watch.replaced()}
        for place, reader in list(self._places.items()):
            if reader in lost or not self._region.num_sent(place):
                del self._places[place]
                self._region.free(place)
