"""What a grammar does not allow gets minus infinity, and nothing else changes."""

import pytest
import torch

from headrace.engine_proc.worker.cuda.kernels.grammar_mask import apply_mask, reference


@pytest.mark.parametrize("vocab_size", [1, 32, 77, 1100])
@pytest.mark.parametrize("masked_rows", [[], [2], [0, 3]])
@pytest.mark.parametrize("num_lacking", [0, 1])  # words
def test_masks_are_applied_as_in_torch(
    vocab_size: int, masked_rows: list[int], num_lacking: int, device: torch.device
) -> None:
    torch.manual_seed(0)
    num_words = max(1, -(-vocab_size // 32) - num_lacking)
    logits = torch.randn(4, vocab_size + 3, device=device)[:, :vocab_size]
    masks = torch.randint(-(2**31), 2**31, (len(masked_rows), num_words), dtype=torch.int64)
    masks = masks.int().to(device)
    rows = torch.tensor(masked_rows, dtype=torch.int32, device=device)
    expected = logits.clone()
    reference(expected, rows, masks)
    apply_mask(logits, rows, masks)
    torch.testing.assert_close(logits, expected, atol=0, rtol=0)
