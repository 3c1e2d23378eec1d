"""Tokenizers see which pages an engine has."""

import os
import subprocess
import sys
import time
from array import array
from itertools import chain
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.ipc.page_digests import chain_digests
from headrace.ipc.prefix_index import (
    LINE_PLACES,
    PLACES,
    PrefixIndex,
    create_prefix_index,
    key_of,
)

PAGE = 2


def digests_of(tokens: list[int]) -> list[bytes]:
    digests: list[bytes] = []
    chain_digests(digests, array("i", tokens), PAGE, len(tokens) // PAGE)
    return digests


def digest_at(place: int, number: int) -> bytes:
    """Return one of the digests that name a place."""
    return (place + number * PLACES).to_bytes(16, "little")


def test_digests_of_one_place_share_a_cache_line() -> None:
    fd = create_prefix_index()
    engine, tokenizer = PrefixIndex(fd), PrefixIndex(fd)
    digests = [digest_at(5, number) for number in range(LINE_PLACES)]
    assert len({key_of(digest) for digest in digests}) == LINE_PLACES
    for digest in digests * 2:
        engine.add(digest)
    assert tokenizer.count_cached(digests) == LINE_PLACES
    words = [word for word in engine.words if word]
    assert words == [word for word in engine.words[:LINE_PLACES] if word], "all in one line"
    engine.remove(digests[0])
    assert tokenizer.count_cached(digests[1:]) == LINE_PLACES - 1
    assert tokenizer.count_cached(digests) == 0
    engine.add(digest_at(5, LINE_PLACES))
    assert tokenizer.count_cached(digests[1:]) == LINE_PLACES - 1, "there was room"
    os.close(fd)


def test_digests_of_a_full_line_displace_each_other() -> None:
    fd = create_prefix_index()
    index = PrefixIndex(fd)
    digests = [digest_at(5, number) for number in range(LINE_PLACES + 1)]
    for digest in digests:
        index.add(digest)
    cached = [index.count_cached([digest]) for digest in digests]
    assert sum(cached) == LINE_PLACES and cached[-1]
    displaced = digests[cached.index(0)]
    index.remove(displaced)
    assert sum(index.count_cached([digest]) for digest in digests) == LINE_PLACES
    index.clear()
    assert not any(index.words)
    os.close(fd)


def test_chains_of_a_full_pool_are_whole() -> None:
    fd, random = create_prefix_index(), Random(1)
    index = PrefixIndex(fd)
    chains = [[random.randbytes(16) for _ in range(64)] for _ in range(256)]
    for digest in chain.from_iterable(chains):
        index.add(digest)
    assert sum(map(index.count_cached, chains)) >= 0.99 * 256 * 64
    os.close(fd)


CHANGES = """
import select
import sys
from headrace.ipc.prefix_index import PrefixIndex
index, digests = PrefixIndex(int(sys.argv[1])), [bytes.fromhex(one) for one in sys.argv[2:]]
print(flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:  # until it is closed
    for digest in digests:
        index.add(digest)
    for digest in digests:
        index.remove(digest)
"""


def test_a_reader_finds_what_stays_while_its_line_changes() -> None:
    fd = create_prefix_index()
    index = PrefixIndex(fd)
    stays = [digest_at(place, 1) for place in (0, 3, 3)]
    for digest in stays:
        index.add(digest)
    changing = [digest_at(place, 2 + place) for place in range(LINE_PLACES - 2)]
    command = [sys.executable, "-c", CHANGES, str(fd), *(digest.hex() for digest in changing)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    seen, num_looks, end = set(), 0, time.monotonic() + 60
    with subprocess.Popen(command, pass_fds=[fd], **pipes) as writer:
        assert writer.stdin is not None and writer.stdout is not None
        writer.stdout.readline()
        while (seen != {0, 1} or num_looks < 10_000) and time.monotonic() < end:
            num_looks += 1
            assert index.count_cached(stays) == len(stays)
            seen.add(index.count_cached(changing[:1]))
            assert not index.count_cached([digest_at(0, 99)])
        writer.stdin.close()
    assert writer.returncode == 0 and seen == {0, 1}
    os.close(fd)


@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=12), max_size=12))
def test_index_has_the_pages_that_the_pool_has(prompts: list[list[int]]) -> None:
    fd = create_prefix_index()
    reader = PrefixIndex(fd)
    pool = PagePool(8, PAGE, index=PrefixIndex(fd))
    chains = [digests_of(prompt) for prompt in prompts]
    for digests in chains:
        pages = pool.match_prefix(digests)
        pages += pool.allocate(len(digests) - len(pages))
        for page, digest in zip(pages, digests, strict=True):
            pool.cache(page, digest)
        pool.free(pages)
        assert [reader.count_cached(chain) for chain in chains] == [
            pool.count_cached(chain) for chain in chains
        ]
    pool.reset()
    assert not any(reader.count_cached(chain) for chain in chains)
    os.close(fd)
