"""Tokenizers see which pages an engine has."""

import os
from array import array

from hypothesis import given
from hypothesis import strategies as st

from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.ipc.page_digests import chain_digests
from headrace.ipc.prefix_index import PLACES, PrefixIndex, create_prefix_index, key_of

PAGE = 2


def digests_of(tokens: list[int]) -> list[bytes]:
    digests: list[bytes] = []
    chain_digests(digests, array("i", tokens), PAGE, len(tokens) // PAGE)
    return digests


def test_digests_of_one_place_displace_each_other() -> None:
    fd = create_prefix_index()
    engine, tokenizer = PrefixIndex(fd), PrefixIndex(fd)
    one, other = (5).to_bytes(16, "little"), (5 + PLACES).to_bytes(16, "little")
    assert key_of(one) != key_of(other)
    engine.add(one)
    engine.add(other)
    assert (tokenizer.count_cached([one]), tokenizer.count_cached([other])) == (0, 1)
    engine.remove(one)
    assert tokenizer.count_cached([other]) == 1, "it was displaced, and takes nothing along"
    engine.remove(other)
    assert tokenizer.count_cached([other]) == 0
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
