"""Open fetches: the images of a request together, a bounded number of requests at a time.

A request that was in progress when a fetcher died is handled alone, to find the one at fault. A
request to a busy host waits for that host's limit first, and then for one of the shared places.
"""

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import assert_never
from weakref import WeakValueDictionary

from headrace.board.board import Slot
from headrace.board.fields import FetcherField
from headrace.ipc.fetcher_messages import Fetch, Forget, ToFetcher
from headrace.logs import begin_request, log_failure
from headrace.tokenizer_proc.fetcher.download import (
    Budget,
    DownloadedFile,
    DownloadRefused,
    Downloads,
    host_in,
)
from headrace.tokenizer_proc.fetcher.result_sender import FetchResultSender

MAX_FETCHES = 16  # at a time; each has files of --max-body-bytes at most
MAX_OF_HOST = 8  # of these

log = logging.getLogger(__name__)


class Fetches:
    """The requests of all processes.

    Args:
        max_bytes: of the files of a request together.
        slot: of this process, where they are counted.
    """

    def __init__(
        self, downloads: Downloads, results: FetchResultSender, max_bytes: int, slot: Slot
    ) -> None:
        self._downloads = downloads
        self._results = results
        self._max_bytes = max_bytes
        self._slot = slot
        self._places = asyncio.Semaphore(MAX_FETCHES)
        self._hosts: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._alone = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop keeps weak references only
        self._unready: dict[int, asyncio.Task[None]] = {}  # of these, by the ids of requests

    def take(self, message: ToFetcher) -> None:
        """Start or cancel a fetch; a finished one is answered all the same."""
        match message:
            case Fetch():
                self._begin(message)
            case Forget(id):
                if (task := self._unready.pop(id, None)) is not None:
                    task.cancel()
            case _:
                assert_never(message)

    def _begin(self, fetch: Fetch) -> None:
        work = self._suspect(fetch) if fetch.is_suspect else self._unsuspected(fetch)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        self._unready[fetch.id] = task
        task.add_done_callback(self._tasks.discard)

    async def _unsuspected(self, fetch: Fetch) -> None:
        async with AsyncExitStack() as places:
            for host in sorted(set(map(host_in, fetch.urls))):  # in one order: no deadlock
                of_host = self._hosts.setdefault(host, asyncio.Semaphore(MAX_OF_HOST))
                await places.enter_async_context(of_host)
            await places.enter_async_context(self._places)
            await self._fetch(fetch)

    async def _suspect(self, fetch: Fetch) -> None:
        """Fetch with no other fetch beside it."""
        async with self._alone, AsyncExitStack() as places:
            for _ in range(MAX_FETCHES):
                await places.enter_async_context(self._places)
            self._slot[FetcherField.AT_HAND] = fetch.id
            try:
                await self._fetch(fetch)
            finally:
                self._slot[FetcherField.AT_HAND] = 0

    async def _fetch(self, fetch: Fetch) -> None:
        """Fetch all images of a request; at the first that is refused, let the others be."""
        begin_request(fetch.request_id)
        budget = Budget(self._max_bytes)
        files: dict[int, DownloadedFile] = {}

        async def fetch_one(place: int, url: str) -> None:
            try:
                files[place] = await self._downloads.fetch(url, budget)
            except DownloadRefused as refused:
                raise FailedAt(place, str(refused)) from None
            except Exception as error:  # whatever a server makes httpx do
                log_failure(log, f"image {place} cannot be fetched", error)
                raise FailedAt(place, "cannot be fetched") from error

        failed: list[FailedAt] = []
        try:
            async with asyncio.TaskGroup() as group:
                for place, url in enumerate(fetch.urls):
                    group.create_task(fetch_one(place, url))
        except* FailedAt as failures:
            failed += [one for one in failures.exceptions if isinstance(one, FailedAt)]
        self._unready.pop(fetch.id, None)  # an answer is given whole: files wait to be read
        if failed:
            self._slot.add(FetcherField.FETCH_REFUSALS)
            await self._results.refuse(fetch, failed[0].place, failed[0].why)
        else:
            self._slot.add(FetcherField.FETCHED_IMAGES, len(files))
            await self._results.send(fetch, [files[place] for place in range(len(files))])


class FailedAt(Exception):
    """One of a request's images is refused."""

    def __init__(self, place: int, why: str) -> None:
        super().__init__(why)
        self.place = place
        self.why = why
