"""docs/messages.md, which `make messages` writes."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_page_of_messages_is_current() -> None:
    command = [sys.executable, ROOT / ".ci" / "messages.py"]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert made == (ROOT / "docs" / "messages.md").read_text(), "make messages"
