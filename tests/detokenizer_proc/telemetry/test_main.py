"""What the telemetry process and the others load."""

import subprocess
import sys

import pytest

MAINS = (
    "detokenizer_proc.telemetry.main",
    "frontend.main",
    "detokenizer_proc.main",
    "launch.serve",
)


@pytest.mark.parametrize("module", MAINS)
def test_opentelemetry_is_loaded_for_traces_only(module: str) -> None:
    code = f"import headrace.{module}, sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not any(name.startswith("opentelemetry.") for name in result.stdout.split())
