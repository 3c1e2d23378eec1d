"""Order and limits of concurrent image fetches."""

import asyncio
from collections.abc import Sequence
from typing import Any

from headrace.board.board import Board, Seat
from headrace.board.fields import FetcherField
from headrace.ipc.fetcher_messages import Fetch, Forget
from headrace.tokenizer_proc.fetcher.download import Budget, DownloadedFile, DownloadRefused
from headrace.tokenizer_proc.fetcher.fetches import MAX_FETCHES, MAX_OF_HOST, Fetches

DEADLINE_S = 120
FILE = DownloadedFile(b"", "image/png")


class Hosts:
    """Answers at once; but what is slow, when it is let."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_answer = asyncio.Event()

    async def fetch(self, url: str, _budget: Budget) -> DownloadedFile:
        self.asked.append(url)
        if "slow" in url:
            await self.may_answer.wait()
        if "gone" in url:
            raise DownloadRefused("is gone")
        return FILE


class Answers:
    """Answers, by the ids of what was asked for."""

    def __init__(self) -> None:
        self.found: dict[int, int] = {}  # how many files,
        self.refused: dict[int, tuple[int, str]] = {}
        self.may_go = asyncio.Event()
        self.may_go.set()

    async def send(self, fetch: Fetch, files: Sequence[DownloadedFile]) -> None:
        await self.may_go.wait()
        self.found[fetch.id] = len(files)

    async def refuse(self, fetch: Fetch, place: int, why: str) -> None:
        self.refused[fetch.id] = place, why


class Rig:
    """Fetches, between fake hosts and recorded answers."""

    def __init__(self) -> None:
        self.hosts, self.answers = Hosts(), Answers()
        self.slot = Board.create([Seat("fetcher", 0)]).slot("fetcher")
        hosts: Any = self.hosts
        answers: Any = self.answers
        self.fetches = Fetches(hosts, answers, 1000, self.slot)
        self._num_asked = 0

    def ask(self, *urls: str, is_suspect: bool = False) -> int:
        """Ask for images; return the id."""
        self._num_asked += 1
        self.fetches.take(Fetch(self._num_asked, 0, list(urls), is_suspect))
        return self._num_asked

    def forget(self, *ids: int) -> None:
        """Wait for these no more."""
        for id in ids:
            self.fetches.take(Forget(id))

    async def until_asked(self, url: str) -> None:
        """Wait until a host is asked."""
        async with asyncio.timeout(DEADLINE_S):
            while url not in self.hosts.asked:
                await asyncio.sleep(0)

    async def until(self, *ids: int) -> None:
        """Wait until these are answered."""
        async with asyncio.timeout(DEADLINE_S):
            while not set(ids) <= self.answers.found.keys() | self.answers.refused.keys():
                await asyncio.sleep(0)


async def test_a_slow_host_leaves_room_for_others() -> None:
    rig = Rig()
    slow = [rig.ask(f"http://slow.com/{i}") for i in range(3 * MAX_FETCHES)]
    fast = [rig.ask(f"http://fast.com/{i}", "https://other.com/") for i in range(3 * MAX_FETCHES)]
    await rig.until(*fast)
    assert len([url for url in rig.hosts.asked if "slow" in url]) == MAX_OF_HOST < MAX_FETCHES
    both = [rig.ask("http://fast.com/", "http://slow.com/") for _ in range(MAX_FETCHES)]
    both += [rig.ask("http://slow.com/", "http://fast.com/") for _ in range(MAX_FETCHES)]
    rig.hosts.may_answer.set()
    await rig.until(*slow, *both)
    assert rig.answers.found == dict.fromkeys(slow, 1) | dict.fromkeys(fast + both, 2)
    assert rig.slot[FetcherField.FETCHED_IMAGES] == sum(rig.answers.found.values())


async def test_of_images_that_are_refused_the_first_is_named() -> None:
    rig = Rig()
    ids = [rig.ask("http://a.com/", "http://gone.com/"), rig.ask("nonsense", "http://[gone")]
    await rig.until(*ids)
    assert rig.answers.refused == {ids[0]: (1, "is gone"), ids[1]: (1, "is gone")}
    assert rig.slot[FetcherField.FETCH_REFUSALS] == 2


async def test_a_suspect_is_fetched_alone() -> None:
    rig = Rig()
    before = rig.ask("http://slow.com/")
    suspect = rig.ask("http://slow.net/", is_suspect=True)
    for _ in range(4 * MAX_FETCHES):
        await asyncio.sleep(0)
    assert rig.hosts.asked == ["http://slow.com/"]
    after = rig.ask("http://fast.com/")
    rig.hosts.may_answer.set()
    await rig.until(before, suspect, after)
    assert rig.hosts.asked == ["http://slow.com/", "http://slow.net/", "http://fast.com/"]
    assert rig.slot[FetcherField.AT_HAND] == 0


async def test_forgotten_fetch_makes_room() -> None:
    rig = Rig()
    slow = [rig.ask(f"http://slow.com/{i}") for i in range(MAX_OF_HOST + 2)]
    await rig.until_asked(f"http://slow.com/{MAX_OF_HOST - 1}")
    rig.forget(slow[0], slow[MAX_OF_HOST], 1000)
    await rig.until_asked(f"http://slow.com/{MAX_OF_HOST + 1}")
    rig.hosts.may_answer.set()
    others = [id for id in slow if id not in (slow[0], slow[MAX_OF_HOST])]
    await rig.until(*others)
    assert rig.answers.found == dict.fromkeys(others, 1)
    assert f"http://slow.com/{MAX_OF_HOST}" not in rig.hosts.asked


async def test_a_suspect_that_is_forgotten_leaves_all_places_to_others() -> None:
    rig = Rig()
    before = rig.ask("http://slow.com/")
    await rig.until_asked("http://slow.com/")
    suspects = [rig.ask(f"http://slow.net/{i}", is_suspect=True) for i in range(2)]
    for _ in range(4 * MAX_FETCHES):
        await asyncio.sleep(0)
    rig.forget(suspects[0], before)
    await rig.until_asked("http://slow.net/1")
    assert rig.slot[FetcherField.AT_HAND] == suspects[1]
    rig.forget(suspects[1])
    after = [rig.ask(f"http://{i}.com/slow") for i in range(MAX_FETCHES)]
    await rig.until_asked(f"http://{MAX_FETCHES - 1}.com/slow")
    assert rig.slot[FetcherField.AT_HAND] == 0
    rig.hosts.may_answer.set()
    await rig.until(*after)
    assert rig.answers.found == dict.fromkeys(after, 1)
    assert not rig.fetches._unready


async def test_what_is_ready_is_answered_whole() -> None:
    rig = Rig()
    rig.answers.may_go.clear()
    ready = rig.ask("http://fast.com/")
    await rig.until_asked("http://fast.com/")
    for _ in range(MAX_FETCHES):
        await asyncio.sleep(0)
    rig.forget(ready)
    rig.answers.may_go.set()
    await rig.until(ready)
