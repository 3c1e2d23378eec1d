"""Log probabilities are the reference's; `test_cuda_sampler.py` compares the C++ sampler's."""

from typing import Any

import pytest
import torch

from headrace.engine_proc.worker.cuda.kernels import logprobs, top_k_top_p, vocab_slices
from headrace.engine_proc.worker.cuda.kernels.logprobs import reference, report


def test_the_likeliest_are_reported_best_first(device: torch.device) -> None:
    logits = torch.randn(6, 2200) * 3  # in two blocks
    logits[1, 5:] = -torch.inf
    logits[2, ::2] = 4.0  # equals, the lower token first
    logits[3, :3] = torch.tensor([torch.nan, -0.0, 0.0])
    logits[4] = -torch.inf
    tokens = torch.tensor([3, 7, 4, 1, 9, 2199], dtype=torch.int32)
    num_tops = torch.tensor([4, 7, 3, 0, 2, 1], dtype=torch.int32)
    given = [x.to(device) for x in (logits, tokens, num_tops)]
    found, expected = report(*given, 7).cpu(), reference(*given, 7).cpu()
    for row, num_top in enumerate(num_tops.tolist()):
        end = 2 + 2 * num_top
        ours, theirs = found[row, :end], expected[row, :end]
        assert ours[[1, *range(2, end, 2)]].tolist() == theirs[[1, *range(2, end, 2)]].tolist()
        logprobs = [x[[0, *range(3, end, 2)]].view(torch.float32) for x in (ours, theirs)]
        torch.testing.assert_close(*logprobs, atol=2e-6, rtol=0)
    assert report(*[x[:0] for x in given], 0).shape == (0, 2)


def test_the_likeliest_are_found_in_few_passes(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """One for the highest, three or four to the limit, one to take them."""
    if device.type == "cuda":
        pytest.skip("calls are counted in the interpreter")
    blocks: list[object] = []

    def counted(own: Any) -> Any:
        return lambda *args: (blocks.append(args), own(*args))[1]

    monkeypatch.setattr(vocab_slices, "BLOCK", 32)
    for module in (logprobs, top_k_top_p, vocab_slices):
        monkeypatch.setattr(module, "load_block", counted(module.load_block))
    one = torch.ones(1, dtype=torch.int32)
    torch.manual_seed(0)
    report(torch.randn(1, 800), one, 20 * one, 20)
    assert len(blocks) <= 6 * 800 / 32


def test_a_vocabulary_of_fewer_tokens_is_reported_whole(device: torch.device) -> None:
    logits = torch.zeros(1, 3, device=device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    assert report(logits, one, 5 * one, 5)[0, 2::2].tolist() == [0, 1, 2, -1, -1]
