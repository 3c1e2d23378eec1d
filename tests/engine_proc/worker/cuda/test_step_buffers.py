"""Steps go to the device through memory that is not written to while it is on its way."""

import torch
from random_decoders import batch

from headrace.engine_proc.worker.cuda.buckets import Sizes
from headrace.engine_proc.worker.cuda.step_buffers import StepBuffers
from headrace.engine_proc.worker.cuda.step_inputs import prepare_inputs

MOST = Sizes(num_tokens=40, num_sequences=4, num_rows=6)


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
    buffers = StepBuffers(MOST, 19, 10, torch.device("cpu"), lambda: SaidEvent(said))
    for _ in range(4):
        buffers.send(batch([(0, 0, 3)]))
    verbs = [verb for verb, _ in said]
    events = [event for _, event in said]
    assert verbs == ["wait", "sent"] * 4
    assert events[0::2] == events[1::2]
    assert events[0] is events[4] is not events[2]
    assert events[2] is events[6]


def test_a_step_replaces_the_one_before() -> None:
    buffers = StepBuffers(MOST, 19, 10, torch.device("cpu"))
    for parts in ([(0, 0, 30), (1, 0, 5)], [(2, 7, 8)]):
        step = batch(parts)
        sizes = buffers.send(step)
        assert sizes == Sizes(len(step.token_ids), len(parts), len(step.logit_rows))
        inputs = prepare_inputs(buffers.packed, buffers.drawn, sizes, 19, 16)
        assert inputs.token_ids.tolist() == step.token_ids.tolist()
        assert inputs.positions.tolist() == step.positions.tolist()
    buffers.clear()
    assert prepare_inputs(buffers.packed, buffers.drawn, sizes, 19, 16).kv_rows.tolist() == [-1]


def test_more_rows_than_graphs_have_get_logits_of_their_own() -> None:
    buffers = StepBuffers(MOST, 19, 10, torch.device("cpu"))
    assert buffers.logits_of(6).data_ptr() == buffers.logits.data_ptr()
    assert buffers.logits_of(2).shape == (2, 10)
    assert buffers.logits_of(7).shape == (7, 10)
