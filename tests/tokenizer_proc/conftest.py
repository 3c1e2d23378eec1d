"""Folders of models that take images, and a test without garbage collection."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a family's model, without weights."""
    # here, so that tests of texts load neither transformers nor torch
    from tiny_vision import save_processor, save_tokenizer, vision_config

    folders: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in folders:
            made = folders[family] = tmp_path_factory.mktemp(family)
            vision_config(family).save_pretrained(made)
            save_tokenizer(made, family)
            save_processor(made, family)
        return folders[family]

    return folder


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Callbacks of a collection, and `__del__` of garbage, would swallow an interrupt."""
    gc.disable()
    yield
    gc.enable()
