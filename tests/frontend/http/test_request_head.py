"""A key is read from the headers of either API."""

import pytest

from headrace.frontend.http.request_head import RequestHead


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([], None),
        ([(b"authorization", b"Bearer  a ")], b"a"),
        ([(b"authorization", b"bearer a"), (b"x-api-key", b"b")], b"a"),
        ([(b"x-api-key", b"b"), (b"authorization", b"bearer a")], b"a"),
        ([(b"authorization", b"Basic a"), (b"x-api-key", b" b ")], b"b"),
        ([(b"authorization", b"Basic a")], None),
    ],
)
def test_a_key_is_a_bearers_or_as_with_anthropic(
    headers: list[tuple[bytes, bytes]], key: bytes | None
) -> None:
    assert RequestHead.of(headers).key == key
