"""A step on the device is the one that was sent last."""

import torch
from random_decoders import batch

from headrace.engine_proc.worker.cuda.graph_sizes import Sizes
from headrace.engine_proc.worker.cuda.step_buffers import StepBuffers
from headrace.engine_proc.worker.cuda.step_inputs import prepare_inputs

MOST = Sizes(num_tokens=40, num_sequences=4, num_rows=6)


def buffers_on(device: torch.device) -> StepBuffers:
    return StepBuffers(MOST, page_tokens=16, max_pages=19, vocab_size=10, device=device)


def test_a_step_replaces_the_one_before(device: torch.device) -> None:
    buffers = buffers_on(device)
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
    buffers = buffers_on(torch.device("cpu"))
    assert buffers.logits_of(6).data_ptr() == buffers.logits.data_ptr()
    assert buffers.logits_of(2).shape == (2, 10)
    assert buffers.logits_of(7).shape == (7, 10)
