"""The number by which machines tell whether their processors compute the same bits."""

import pytest

from headrace.system import machine
from headrace.system.machine import kernels_number


def number(
    monkeypatch: pytest.MonkeyPatch, kernels: str, device: str = "cpu", has_gpus: bool = False
) -> int:
    monkeypatch.setattr(machine, "best_kernels", lambda: kernels)
    monkeypatch.setattr(machine, "has_gpus", lambda: has_gpus)
    return kernels_number(device)


def test_kernels_of_the_same_name_have_the_same_number(monkeypatch: pytest.MonkeyPatch) -> None:
    own = number(monkeypatch, "avx512")
    assert 0 < own < 1 << 63
    assert own == number(monkeypatch, "avx512", "auto")
    assert own != number(monkeypatch, "avx512 with amx")


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_kernels_of_a_processor_have_no_number_beside_gpus(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    assert number(monkeypatch, "avx512", device, has_gpus=True) == 0
