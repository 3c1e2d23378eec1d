"""What exit statuses mean: numbers that others rely on, as they are documented."""

import re
import subprocess
import sys
from pathlib import Path

from headrace.exit_status import ExitStatus

OPERATIONS = Path(__file__).parents[2] / "docs/operations.md"


def test_numbers_stay_what_they_are() -> None:
    assert {status.name: status.value for status in ExitStatus} == {
        "TOLD": 0,
        "FAILED": 1,
        "BAD_FLAGS": 2,
        "BAD_MODEL": 3,
        "HOPELESS": 4,
        "SHORT_OF": 5,
        "PEER_LOST": 6,
        "NODE_LOST": 7,
    }


def test_all_are_documented() -> None:
    _, table = OPERATIONS.read_text().split(
        "The server's exit status gives the reason for its end", 1
    )
    numbers = re.findall(r"^\| (\d) \| ", table.split("\n## ", 1)[0], re.MULTILINE)
    assert [int(number) for number in numbers] == list(ExitStatus)


def test_unexpected_error_exits_with_1_and_a_traceback() -> None:
    code = "import headrace.launch.serve as l; l.read_card = lambda _: 1 / 0; l.main([])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.endswith("ZeroDivisionError: division by zero\n")
