"""Whose share of the engine a request counts towards."""

import pytest

from headrace.ipc.messages import AdapterSource, HttpRequest
from headrace.tokenizer_proc.prompts import key_of

ADAPTERS = [AdapterSource(name, f"/{name}", name.encode()) for name in "ab"]


def test_unnamed_clients_share_the_engine_by_adapter() -> None:
    http = HttpRequest(1, "POST", "/v1/completions", 0.0)
    keys = [key_of(http, None, adapter) for adapter in (None, *ADAPTERS)]
    assert len(set(keys)) == 3
    assert key_of(http, None, ADAPTERS[0]) == keys[1]


@pytest.mark.parametrize(("key", "user"), [(7, None), (7, "me"), (0, "me")])
def test_a_named_client_has_one_share_of_all_adapters(key: int, user: str | None) -> None:
    http = HttpRequest(1, "POST", "/v1/completions", 0.0, key=key)
    assert key_of(http, user, ADAPTERS[0]) == key_of(http, user, ADAPTERS[1])
