"""llama.cpp in a process of its own, asked by lines of JSON (`llama_worker.py`)."""

import json
import subprocess
from pathlib import Path
from typing import Any


class LlamaProcess:
    """A worker with a model file, run by the Python that has `llama-cpp-python`."""

    def __init__(self, python: str, model: Path, threads: int) -> None:
        worker = Path(__file__).with_name("llama_worker.py")
        self._process = subprocess.Popen(
            [python, str(worker), str(model), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, command: dict[str, Any]) -> tuple[float, list[int]]:
        """Return the seconds that a command took, and the tokens that it made."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the llama.cpp worker ended; what it said is above")
        answer = json.loads(line)
        return answer["seconds"], answer["tokens"]

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
