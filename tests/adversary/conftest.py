"""Models and what they say, for servers that are attacked."""

from pathlib import Path

import pytest

from headrace.config.model_card import find_demo_model
from support.tiny import write_tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of one layer: all that takes long is around it."""
    demo = find_demo_model()
    assert demo is not None, "install the demo model: make install"
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(demo, folder)
    return folder
