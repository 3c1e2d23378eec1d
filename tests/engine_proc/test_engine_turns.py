"""What the engine takes between two steps is bounded, whatever has arrived."""

from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_rig import FIRST, WAIT_MS, Rig, generate

from headrace.engine_proc.request_io.turn import MAX_TURN_BYTES, MESSAGE_BYTES


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def test_engine_steps_between_the_sequences_of_a_request(rig: Rig) -> None:
    num, per_turn = 12, 3
    size = MAX_TURN_BYTES // per_turn - MESSAGE_BYTES
    prompt = bytes(array("I", [1] * (size // 4)))
    requests = [generate(FIRST + index) for index in range(num)]
    rig.outbox.send_all([(request, prompt) for request in requests])
    assert rig.inbox.wait(WAIT_MS)
    taken = []
    for _ in range(num // per_turn):
        rig.engine.receive(rig.inbox)
        taken.append(len(rig.scheduler.waiting))
    assert taken[0] <= per_turn + 1
    assert taken[-1] == num
