"""Products of integers by AVX-VNNI, beside those of AVX2 alone: the same bits."""

import platform
import signal
import subprocess
from pathlib import Path

import pytest
from kernel_driver import compile_native, outputs

pytestmark = pytest.mark.slow


def test_products_by_avx_vnni_have_the_bits_of_avx2(tmp_path: Path) -> None:
    """The driver also sees that no batch changes a row's bits."""
    if platform.machine() != "x86_64":
        pytest.skip("AVX-VNNI is x86's")
    program = compile_native(tmp_path)
    tried = subprocess.run([program, "avx2 with vnni"], capture_output=True)
    if tried.returncode == -signal.SIGILL:
        pytest.skip("this processor has no AVX-VNNI")
    found, expected = (outputs([program, name]) for name in ("avx2 with vnni", "avx2"))
    assert found == expected
    assert sum(name.startswith("int") for name in found) > 20
