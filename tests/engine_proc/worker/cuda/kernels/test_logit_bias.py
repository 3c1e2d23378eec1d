"""Biases are added to a row's own tokens, bans last."""

import torch

from headrace.engine_proc.worker.cuda.kernels.logit_bias import add_biases, reference


def test_each_row_has_its_own_biases(device: torch.device) -> None:
    logits = torch.randn(4, 900)[:, 3:703].to(device)
    counts = torch.tensor([3, 0, 600, 2], dtype=torch.int32)
    starts = torch.tensor([0, 3, 3, 603], dtype=torch.int32)
    tokens = torch.cat(
        [torch.tensor([5, 5, 9000]), torch.randperm(700)[:600], torch.tensor([1, 1])]
    )
    biases = torch.randn(605)
    biases[[1, 77, 603, 604]] = -torch.inf  # a token that is biased, too; and twice the same
    given = [x.to(device) for x in (starts, counts, tokens.int(), biases)]
    expected = logits.clone()
    reference(expected, *given)
    add_biases(logits, *given)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)
    assert logits.isinf().sum() == 3
    add_biases(logits[:0], *[x[:0] for x in given[:2]], *given[2:])
