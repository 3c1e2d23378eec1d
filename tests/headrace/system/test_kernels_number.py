"""The number by which machines tell whether their processors compute the same bits."""

import pytest

from headrace.system import machine
from headrace.system.machine import kernels_number


def number(monkeypatch: pytest.MonkeyPatch, kernels: str, *gpus: str) -> int:
    monkeypatch.setattr(machine, "best_kernels", lambda: kernels)
    return kernels_number(gpus)


def test_kernels_of_the_same_name_have_the_same_number(monkeypatch: pytest.MonkeyPatch) -> None:
    own = number(monkeypatch, "avx512")
    assert 0 < own < 1 << 63
    assert own == number(monkeypatch, "avx512")
    assert own != number(monkeypatch, "avx512 with amx")


def test_gpus_of_one_kind_have_a_number_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = number(monkeypatch, "avx512", "NVIDIA H200")
    assert own == number(monkeypatch, "avx2", "NVIDIA H200"), "the CPU decides about no bit"
    assert (
        len({own, number(monkeypatch, "avx512", "NVIDIA L4"), number(monkeypatch, "avx512")}) == 3
    )
