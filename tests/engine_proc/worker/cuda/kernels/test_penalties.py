"""Tokens that a row has had are penalized as the reference says."""

import pytest
import torch

from headrace.engine_proc.worker.cuda.kernels.penalties import Penalties, penalize, reference


def test_each_row_is_penalized_for_its_own_history(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Tables of counts begin with whatever is in memory."""
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: torch.full(shape, 9, **how))
    logits = torch.randn(5, 1500)[:, 100:1400].to(device)
    logits[2, 7] = -torch.inf
    history = torch.randint(0, 1300, (1300,), dtype=torch.int32)
    history[:4] = torch.tensor([7, 7, 9, 5000])
    ints = {
        "rows": [2, 0, 4],
        "starts": [0, 0, 4],
        "num_prompt": [0, 2, 600],
        "num_history": [4, 4, 1200],
    }
    reals = {
        "presence": [0.5, 0.0, 0.25],
        "frequency": [0.0, 0.5, 0.125],
        "repetition": [1.0, 1.25, 1.5],
    }
    penalties = Penalties(
        **{name: torch.tensor(x, dtype=torch.int32, device=device) for name, x in ints.items()},
        **{name: torch.tensor(x, device=device) for name, x in reals.items()},
    )
    expected = logits.clone()
    reference(expected, penalties, history.to(device))
    before = logits.clone()
    penalize(logits, penalties, history.to(device))
    torch.testing.assert_close(logits, expected)
    assert torch.equal(logits[1], before[1])
    assert (logits != before).any(1).tolist() == [True, False, True, False, True]
