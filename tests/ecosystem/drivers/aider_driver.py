"""aider: a question about no file, and a file that the model writes."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scenario import KEY, MODEL, URL, main

folder = tempfile.TemporaryDirectory()
os.chdir(folder.name)
os.environ |= {"OPENAI_API_BASE": f"{URL}/v1", "OPENAI_API_KEY": KEY, "HOME": folder.name}

from aider.coders import Coder  # noqa: E402 (it reads the variables)
from aider.io import InputOutput  # noqa: E402
from aider.models import Model  # noqa: E402

NOT_OFFERED = {
    **dict.fromkeys(("auto", "required", "named"), "edits are text"),
    "structured": "edits are text",
    "error": "errors are printed",
    "abort": "Ctrl-C at the terminal ends a stream",
}


def coder(max_tokens: int, edit_format: str, *files: str, is_streamed: bool = True) -> Any:
    model = Model(f"openai/{MODEL}")
    model.extra_params = {"max_tokens": max_tokens, "temperature": 0, "num_retries": 0}
    io = InputOutput(yes=True, pretty=False, fancy_input=False)
    told: Any = {"use_git": False, "fnames": files, "stream": is_streamed, "map_tokens": 0}
    return Coder.create(main_model=model, edit_format=edit_format, io=io, **told)


def chat(question: str, max_tokens: int) -> str:
    """Ask whole; a model that can is told to write a file, too."""
    if MODEL != "demo":
        wanted = "Write a function add(a, b) into add.py. Write nothing else."
        coder(200, "whole", "add.py").run(wanted)
        assert "def add(" in Path("add.py").read_text()
    return str(coder(max_tokens, "ask", is_streamed=False).run(question))


def stream(question: str, max_tokens: int) -> Iterator[str]:
    yield from coder(max_tokens, "ask").run_stream(question)


main(globals())
