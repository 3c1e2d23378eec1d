"""Parts of the C++ core alone, under sanitizers, called by a program with random input."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLAGS = ("-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
DEADLINE_S = 1800
ROUNDS = os.environ.get("FUZZ_ROUNDS", "400")


def fuzz(driver: Path, core: str, folder: Path) -> None:
    """Build `driver` with a file of csrc/, in a folder, and see that its rounds end well."""
    program = folder / driver.stem
    command = ["g++", *FLAGS, f"-I{ROOT / 'csrc'}", driver, ROOT / "csrc" / core, "-o", program]
    subprocess.run(command, check=True, timeout=DEADLINE_S)
    command = [program, "1", ROUNDS]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{ROUNDS} rounds")
