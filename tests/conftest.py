"""What all tests have in common."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# Read when triton is first imported, be it by transformers.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
# Threads that spin while they wait for each other take ten times as long beside busy servers.
os.environ.setdefault("OMP_NUM_THREADS", "1")

SYSTEM = "tests/system/"
RECOVERY = "tests/system/test_recovery.py"

# How fast examples are made says how busy the machine is, and nothing about us.
settings.register_profile("headrace", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("headrace")


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers of tests leave nothing in the home of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A folder for sockets, whose names have room for no more than a short one."""
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        yield Path(folder)


class Schedule(LoadScopeScheduling):
    """With `-n 2`, a process runs a file at a time, and those of tests/system one after the other.

    They share a server; but recovery has its own, and takes as long as many others together.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return SYSTEM if file.startswith(SYSTEM) and file != RECOVERY else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Schedule:
    return Schedule(config, log)
