"""The core of the detokenizer touches no memory but its own, whatever it is called with."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLAGS = ("-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
DEADLINE_S = 1800
ROUNDS = os.environ.get("FUZZ_ROUNDS", "1000")  # of 400 calls


def test_the_core_keeps_to_its_memory(tmp_path: Path) -> None:
    program = tmp_path / "texts_fuzz"
    driver = Path(__file__).with_name("texts_fuzz.cpp")
    core = ROOT / "csrc" / "detokenizer.cpp"
    command = ["g++", *FLAGS, f"-I{ROOT / 'csrc'}", str(driver), str(core), "-o", str(program)]
    subprocess.run(command, check=True, timeout=DEADLINE_S)
    command = [str(program), "1", ROUNDS]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{ROUNDS} rounds")
