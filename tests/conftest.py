"""What all tests have in common."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# How fast examples are made says how busy the machine is, and nothing about us.
settings.register_profile("headrace", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("headrace")


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers of tests leave nothing in the home of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
