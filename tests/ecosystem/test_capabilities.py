"""Each client does with our servers whatever it can do; the table is in docs/clients.md."""

import pytest
from client_table import Outcomes
from clients import CAPABILITIES, CLIENTS

pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("outcomes", CLIENTS, indirect=True, ids=lambda client: client.name)
def test_client_has_capability(outcomes: Outcomes, capability: str) -> None:
    outcome, note = outcomes[capability]["outcome"], outcomes[capability]["note"]
    if outcome == "not offered":
        pytest.skip(f"not offered: {note}")
    assert outcome == "ok", note
