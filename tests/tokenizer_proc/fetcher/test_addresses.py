"""Only addresses that are reachable from everywhere are public."""

import pytest

from headrace.tokenizer_proc.fetcher.addresses import is_for_one, is_public

PUBLIC = ["8.8.8.8", "93.184.215.14", "2606:4700:4700::1111"]
LOCAL = [
    "127.0.0.1", "127.8.8.8", "::1",  # this machine
    "0.0.0.0", "::",
    "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "fc00::1", "fd12::1", "fec0::1",
    "169.254.169.254", "fe80::1", "fe80::1%lo", "100.64.0.1", "100.127.255.254",
    "224.0.0.1", "239.1.1.1", "ff02::1", "255.255.255.255", "240.0.0.1",
    "192.0.2.1", "198.18.0.1", "203.0.113.9", "2001:db8::1",
    # IPv4 within: mapped, compatible, translated, 6to4 and Teredo
    "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1",
    "2002:7f00:1::", "2001:0:4136:e378:8000:63bf:3fff:fdd2",
]  # fmt: skip


@pytest.mark.parametrize("text", PUBLIC)
def test_the_world_is_public(text: str) -> None:
    assert is_public(text)
    assert is_for_one(text)


@pytest.mark.parametrize("text", LOCAL)
def test_nothing_else_is(text: str) -> None:
    assert not is_public(text)


@pytest.mark.parametrize("text", ["127.0.0.1", "10.0.0.1", "::1", "fd12::1", "::ffff:10.0.0.1"])
def test_a_server_that_is_named_may_be_nearby(text: str) -> None:
    assert is_for_one(text)


@pytest.mark.parametrize(
    "text", ["169.254.169.254", "::ffff:169.254.169.254", "fe80::1", "0.0.0.0", "::", "224.0.0.1"]
)
def test_metadata_is_no_server_that_is_named(text: str) -> None:
    assert not is_for_one(text)
