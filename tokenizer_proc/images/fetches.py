"""Image fetches: URLs in requests are sent to the fetcher, and the requests wait aside.

What was asked of a fetcher that died is asked of the next, which handles each request alone. One
that is at hand when fetchers die, again, has failed.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from headrace.board.board import Board
from headrace.board.fields import FetcherField
from headrace.board.replacements import ReplacementWatch
from headrace.errors import DeadlyRequest, InvalidValue, RequestError
from headrace.ipc.arena import Arena, Stale
from headrace.ipc.fetcher_messages import Fetch, Fetched, Forget, FromFetcher
from headrace.ipc.inflight import MAX_BLAMED
from headrace.ipc.sockets import Inbox, Outbox
from headrace.logs import current_request
from headrace.tokenizer_proc.images.sources import Remote
from headrace.tokenizer_proc.jobs.stages import Check, Encoding


class File(NamedTuple):
    """An image as its server has sent it."""

    mime_type: str
    data: bytes


@dataclass(eq=False)
class Asked:
    """A request's images that are being fetched."""

    fetch: Fetch
    remotes: Sequence[Remote]
    check: Check[list[File] | RequestError] = field(default_factory=Check)
    num_blamed: int = 0  # fetchers that have died of it alone


class ImageFetches:
    """Open fetches of one tokenizer process.

    Args:
        index: of this process, among tokenizer processes.
        arena: the fetcher's; a file there is read once, by the process that asked for it.
    """

    def __init__(
        self, index: int, asks: Outbox, answers: Inbox[FromFetcher], arena: Arena, board: Board
    ) -> None:
        self._index = index
        self._asks = asks
        self._answers = answers
        self._arena = arena
        self._slot = board.slot("fetcher")
        self._watch = ReplacementWatch(board, ("fetcher",))
        self._ids = itertools.count(time.monotonic_ns())  # another's in this seat were less
        self._asked: dict[int, Asked] = {}

    def files(self, remotes: Sequence[Remote]) -> Encoding[list[File]]:
        """Have the images of a request fetched.

        Raises:
            RequestError: one of them is not, or fetchers die of them.
        """
        urls = [remote.url for remote in remotes]
        fetch = Fetch(next(self._ids), self._index, urls, request_id=current_request().id)
        asked = self._asked[fetch.id] = Asked(fetch, remotes)
        self._asks.send(fetch)
        try:
            yield asked.check
        finally:
            if self._asked.pop(fetch.id, None) is not None:  # the client has left
                self._asks.send(Forget(fetch.id))
        found = asked.check.found
        assert found is not None
        if isinstance(found, RequestError):
            raise found
        return found

    def look(self) -> None:
        """Take finished fetches, and repeat those that died with a fetcher."""
        while (answer := self._answers.receive(0)) is not None:
            self._take(answer[0])
        if self._watch.replaced():
            for asked in list(self._asked.values()):
                self._ask_again(asked, self._slot[FetcherField.AT_HAND])

    def _take(self, message: Fetched) -> None:
        try:
            files = [bytes(self._arena.read(tensor)) for tensor in message.files]
        except Stale:  # a fetcher has died, and the next one will be asked
            return
        is_here = all(self._arena.holds(tensor) for tensor in message.files)
        for tensor in message.files:
            self._arena.release(tensor)
        asked = self._asked.pop(message.id, None) if is_here else None
        if asked is None:
            return
        if message.why:
            where = asked.remotes[message.failed].where
            asked.check.found = InvalidValue(f"{where}: {message.why}", where)
        else:
            asked.check.found = list(map(File, message.mime_types, files))

    def _ask_again(self, asked: Asked, in_progress: int) -> None:
        asked.num_blamed += in_progress == asked.fetch.id
        if asked.num_blamed >= MAX_BLAMED:
            del self._asked[asked.fetch.id]
            asked.check.found = DeadlyRequest()
            return
        asked.fetch = msgspec.structs.replace(asked.fetch, is_suspect=True)
        self._asks.send(asked.fetch)
