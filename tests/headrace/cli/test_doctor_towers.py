"""The doctor tells where a vision tower runs, why, and what memory it takes."""

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_vision import make_vision_folder

from headrace.cli import doctor
from headrace.config.config import ServerConfig
from headrace.config.model_card import read_card
from headrace.engine_proc.worker import device_selection
from headrace.errors import ModelError
from headrace.system.machine import Machine


def told(folder: Path, capsys: pytest.CaptureFixture[str], *gpus: str) -> str:
    """Return the line of images of a model."""
    config = ServerConfig(model=str(folder))
    doctor.examine_models([config], replace(Machine.look(), gpus=[*gpus], free_bytes=1 << 60))
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith("  images "))
    return line.split(maxsplit=1)[1]


def test_a_tower_is_where_its_decoder_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    smol, gemma = tmp_path / "smolvlm", tmp_path / "gemma3"
    for folder in (smol, gemma):
        make_vision_folder(folder, folder.name)
    core = "taken; the tower runs in the C++ core, with 0.1 MiB of memory"
    assert told(smol, capsys) == told(gemma, capsys) == core
    monkeypatch.setattr(device_selection, "find_gpus", lambda _asked, _num: "")
    modules = "taken; the tower runs in transformers' modules (the decoder runs on GPUs)"
    assert told(smol, capsys, "a GPU") == told(gemma, capsys, "a GPU") == modules


def test_a_tower_that_the_core_cannot_take_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_vision_folder(tmp_path, "gemma3", image_size=70)
    why = "2 rows a side do not divide 5 patches"
    modules = f"transformers' modules ({why}), with 0.1 MiB of memory"
    assert told(tmp_path, capsys) == f"taken; the tower runs in {modules}"


def test_the_weights_of_a_tower_count_once(tmp_path: Path) -> None:
    make_vision_folder(tmp_path, "llava").bfloat16().save_pretrained(tmp_path)
    config = ServerConfig(model=str(tmp_path), device="cpu")
    card = read_card(config)
    stored, held = doctor.tower_bytes(config, card)
    assert held == 2 * stored > 0
    assert doctor.weight_memory(config, card) == card.weight_bytes + held - stored
    (finding,) = [
        one
        for one in doctor.examine_models(
            [config],
            replace(Machine.look(), free_bytes=card.weight_bytes + doctor.kv_bytes(config)),
        )
        if one.fatal
    ]
    assert "weights and KV cache take" in finding.text


def test_a_tower_counts_where_a_draft_model_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> tuple[int, int]:
        raise ModelError("it cannot draft")

    make_vision_folder(tmp_path, "llava")
    config = ServerConfig(model=str(tmp_path), device="cpu")
    card = read_card(config)
    before = doctor.weight_memory(config, card)
    monkeypatch.setattr(doctor, "beside_bytes", fail)
    assert doctor.weight_memory(config, card) == before
