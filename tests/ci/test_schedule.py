"""Which tests one process runs."""

import pytest
from schedule import RULES, SYSTEM, scope_of, shares_fixtures


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def test_it(server: RunningServer) -> None:\n", True),
        ("async def test_it(\n    expected: list[Expected],\n) -> None:\n", True),
        ("@pytest.fixture\ndef client(server: RunningServer) -> Client:\n", True),
        ("def ask(server: RunningServer) -> str:\n", False),
        ("def test_it(own_server: RunningServer) -> None:\n", False),
        ("def server() -> Server:\ndef test_it(server: RunningServer) -> None:\n", False),
    ],
)
def test_files_that_share_a_server_are_known(source: str, expected: bool) -> None:
    assert shares_fixtures(source) == expected


def test_files_with_servers_of_their_own_run_anywhere() -> None:
    assert (
        scope_of("tests/system/test_apis.py") == scope_of("tests/system/test_engine.py") == SYSTEM
    )
    assert scope_of("tests/system/test_recovery.py") == "tests/system/test_recovery.py"
    assert len({scope_of(file) for file in RULES}) == 1
