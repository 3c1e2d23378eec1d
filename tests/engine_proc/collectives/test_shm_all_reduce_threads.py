"""ThreadSanitizer finds no race among ranks, and does where the protocol has been broken."""

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
COLLECTIVES = ROOT / "csrc" / "collectives"
PROTOCOL = COLLECTIVES / "shm_group.cpp"
OTHERS = (
    COLLECTIVES / "shm_all_reduce.cpp",
    COLLECTIVES / "rank_sums.cpp",
    COLLECTIVES.parent / "futex.cpp",
)
DRIVER = Path(__file__).with_name("shm_all_reduce_threads.cpp")
FLAGS = ("-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread")
DEADLINE_S = 600.0
ROUNDS = 100

RACE, WRONG = "ThreadSanitizer: data race", "0 of 3 ranks are right"
ACQUIRE, RELAXED = "std::memory_order_acquire", "std::memory_order_relaxed"
# What is broken: a text in shm_group.cpp, what replaces it, and how that shows. A rank that reads
# what has been written again in order does not race, but adds up the wrong numbers.
BROKEN = {
    "no release": ("round_, std::memory_order_seq_cst", f"round_, {RELAXED}", RACE),
    "no acquire": (
        f"reached(line.round.load({ACQUIRE})",
        f"reached(line.round.load({RELAXED})",
        RACE,
    ),
    "one half": ("(round % 2) * half_bytes_", "0 * half_bytes_", WRONG),
    "no wait": ("wait_for(peer);", "verdict();", WRONG),
}


def compile_one(source: Path, folder: Path) -> Path:
    """Compile a file for ThreadSanitizer."""
    compiled = folder / f"{source.stem}.o"
    command = ["g++", *FLAGS, f"-I{ROOT / 'csrc'}", "-c", source, "-o", compiled]
    subprocess.run(command, check=True, timeout=DEADLINE_S)
    return compiled


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The ranks, compiled, but for the file that is broken."""
    folder = tmp_path_factory.mktemp("ranks")
    return [compile_one(source, folder) for source in (DRIVER, *OTHERS)]


def build(folder: Path, unbroken: list[Path], right: str = "", wrong: str = "") -> Path:
    """Make a program of the ranks, with one text replaced."""
    text = PROTOCOL.read_text()
    assert not right or text.count(right) == 1
    source, program = folder / PROTOCOL.name, folder / "ranks"
    source.write_text(text.replace(right, wrong) if right else text)
    command = ["g++", *FLAGS, compile_one(source, folder), *unbroken, "-o", program]
    subprocess.run(command, check=True, timeout=DEADLINE_S)
    return program


def run(program: Path, num_ranks: int) -> subprocess.CompletedProcess[str]:
    """Let so many ranks call collectives."""
    command = [str(program), str(num_ranks), str(ROUNDS)]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


def test_ranks_do_not_race(tmp_path: Path, unbroken: list[Path]) -> None:
    program = build(tmp_path, unbroken)
    for num_ranks in (2, 3, 4, 8):
        result = run(program, num_ranks)
        assert result.returncode == 0, result.stdout + result.stderr
        assert f"{num_ranks} of {num_ranks} ranks are right" in result.stdout


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_protocol_is_found(tmp_path: Path, unbroken: list[Path], broken: str) -> None:
    right, wrong, shows = BROKEN[broken]
    result = run(build(tmp_path, unbroken, right, wrong), 3)
    assert result.returncode != 0
    assert shows in result.stdout + result.stderr
