"""The number by which machines tell whether their processors compute the same bits."""

from pathlib import Path

import pytest

from headrace.system import machine
from headrace.system.machine import kernels_number


def number(
    monkeypatch: pytest.MonkeyPatch,
    kernels: str,
    device: str = "cpu",
    has_gpus: bool = False,
    root: Path = Path("/"),
) -> int:
    monkeypatch.setattr(machine, "best_kernels", lambda: kernels)
    monkeypatch.setattr(machine, "has_gpus", lambda: has_gpus)
    return kernels_number(device, root)


def test_kernels_of_the_same_name_have_the_same_number(monkeypatch: pytest.MonkeyPatch) -> None:
    own = number(monkeypatch, "avx512")
    assert 0 < own < 1 << 63
    assert own == number(monkeypatch, "avx512", "auto")
    assert own != number(monkeypatch, "avx512 with amx")


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_gpus_of_one_kind_have_a_number_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str
) -> None:
    def on_gpus(*models: str) -> int:
        for place, model in enumerate(models):
            folder = tmp_path / "-".join(models) / f"proc/driver/nvidia/gpus/{place}"
            folder.mkdir(parents=True)
            (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 16\n")
        return number(monkeypatch, "avx512", device, True, tmp_path / "-".join(models))

    own = on_gpus("NVIDIA H200")
    assert own == on_gpus("NVIDIA H200", "NVIDIA H200")
    assert len({0, own, on_gpus("NVIDIA L4"), number(monkeypatch, "avx512")}) == 4


def test_gpus_without_a_name_have_no_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert number(monkeypatch, "avx512", "cuda", True, tmp_path) == 0
