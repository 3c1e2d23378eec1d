"""Numbers are sent from memory that is not written to while they are on their way."""

import torch

from headrace.engine_proc.worker.cuda.sender import Sender


class SaidEvent:
    """Says what is done with it."""

    def __init__(self, said: list[tuple[str, "SaidEvent"]]) -> None:
        self._said = said

    def record(self) -> None:
        self._said.append(("sent", self))

    def synchronize(self) -> None:
        self._said.append(("wait", self))


def test_a_piece_is_written_to_again_when_it_has_been_sent() -> None:
    said: list[tuple[str, SaidEvent]] = []
    sender = Sender(3, torch.device("cpu"), lambda: SaidEvent(said))
    for number in range(4):
        sender.begin()[:2] = number
        sender.send(2)
        assert sender.received.tolist() == [number, number, 0]
    verbs = [verb for verb, _ in said]
    events = [event for _, event in said]
    assert verbs == ["wait", "sent"] * 4
    assert events[0::2] == events[1::2]
    assert events[0] is events[4] is not events[2]
    assert events[2] is events[6]
