"""The patterns of formats take what Python's readers do, and what is written the standard's way."""

import ipaddress
import re
from collections.abc import Callable
from datetime import date, datetime, time
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.tokenizer_proc.grammar.schema_formats import PATTERNS

YEARS = (
    "0000",
    "0001",
    "0004",
    "1900",
    "1999",
    "2000",
    "2023",
    "2024",
    "2100",
    "2400",
    "9999",
    "10000",
)
DATES = [
    f"{year}-{month:02}-{day:02}"
    for year, month, day in product(YEARS, range(14), (0, 1, 28, 29, 30, 31, 32))
]
TIMES = [
    f"{hour:02}:{minute:02}:{second:02}{fraction}{zone}"
    for hour, minute, second in product((0, 19, 23, 24), (0, 59, 60), (0, 59, 60))
    for fraction in ("", ".5", ".123456")
    for zone in ("Z", "+00:00", "-23:59", "+24:00")
]


def is_read(read: Callable[[str], Any], text: str) -> bool:
    """Whether a text is taken by what reads such texts."""
    try:
        read(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "read", "texts"),
    [
        ("date", date.fromisoformat, DATES),
        ("time", time.fromisoformat, TIMES),
        ("date-time", datetime.fromisoformat, [f"{day}T08:30:00Z" for day in DATES]),
        ("date-time", datetime.fromisoformat, [f"2024-02-29T{time}" for time in TIMES]),
    ],
)
def test_dates_and_times_are_those_there_are(
    name: str, read: Callable[[str], Any], texts: list[str]
) -> None:
    found = [text for text in texts if re.search(PATTERNS[name], text)]
    assert found == [text for text in texts if is_read(read, text)]
    assert 0 < len(found) < len(texts)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("date", "20240101"),
        ("date", "2024-W01-1"),
        ("date", "2024-1-01"),
        ("time", "08:30:00"),
        ("time", "08:30Z"),
        ("time", "08:30:00-00:60"),
        ("date-time", "2024-01-01 08:30:00Z"),
        ("date-time", "2024-01-01"),
    ],
)
def test_what_only_some_readers_take_is_not_written(name: str, text: str) -> None:
    assert not re.search(PATTERNS[name], text)


@given(
    st.ip_addresses(v=6).map(str)
    | st.from_regex(r"\A([0-9a-f]{0,5}:){1,8}([0-9a-f]|1\.2\.3\.4)?\Z")
)
def test_an_ipv6_address_is_one(text: str) -> None:
    assert bool(re.search(PATTERNS["ipv6"], text)) == is_read(ipaddress.IPv6Address, text)
