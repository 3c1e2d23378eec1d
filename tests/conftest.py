"""What all tests have in common."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Read when triton is first imported, be it by transformers.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
# Threads that spin while they wait for each other take ten times as long beside busy servers.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How fast examples are made says how busy the machine is, and nothing about us.
settings.register_profile("headrace", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("headrace")


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers of tests leave nothing in the home of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
