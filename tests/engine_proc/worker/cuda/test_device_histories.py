"""Histories on the device have what a step brings, where it says."""

import msgspec
import numpy as np
import pytest
import torch

from headrace.engine_proc.worker.cuda import cuda_sampler
from headrace.engine_proc.worker.cuda.cuda_sampler import DeviceHistories
from headrace.ipc.worker_messages import Step

NOTHING = torch.zeros(0, dtype=torch.int32)
EMPTY = Step(token_ids=b"", positions=b"", sequences=b"", page_table=b"", logit_rows=b"", rows=b"")


def telling(*updates: tuple[int, int, list[int]]) -> Step:
    """Return a step with updates: a slot, a place in it, tokens."""
    places = [(slot, start, len(tokens)) for slot, start, tokens in updates]
    tokens = [token for _, _, own in updates for token in own]
    return msgspec.structs.replace(
        EMPTY,
        history=np.array(tokens, np.int32).tobytes(),
        history_updates=np.array(places, np.int32).tobytes(),
    )


def rows_of(histories: DeviceHistories) -> list[list[int]]:
    rows: list[list[int]] = histories.tokens.view(3, 5).tolist()
    return rows


@pytest.mark.parametrize("piece_tokens", [1, 3, 100])
def test_tokens_come_where_an_update_says_and_nowhere_else(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, piece_tokens: int
) -> None:
    monkeypatch.setattr(cuda_sampler, "PIECE_TOKENS", piece_tokens)
    histories = DeviceHistories(3, 5, device)
    histories.tokens.fill_(9)
    drawn = torch.tensor([40, 50, 60], dtype=torch.int32, device=device)
    histories.update(EMPTY, drawn)
    histories.update(telling((2, 1, [1, 2, 3, 4]), (0, 0, [5, -3])), drawn)
    assert rows_of(histories) == [[5, 60, 9, 9, 9], [9] * 5, [9, 1, 2, 3, 4]]
    histories.update(telling((2, 2, [-1, -2])), drawn)
    assert rows_of(histories)[2] == [9, 1, 40, 50, 4]
    slots = torch.tensor([0, 2], dtype=torch.int32, device=device)
    assert histories.starts(slots).tolist() == [0, 10]


def test_a_history_longer_than_its_slot_is_refused(device: torch.device) -> None:
    with pytest.raises(AssertionError, match="longer than its slot"):
        DeviceHistories(3, 5, device).update(telling((0, 3, [1, 2, 3])), NOTHING)


def test_more_tokens_than_int32_has_numbers_have_places() -> None:
    histories = DeviceHistories(1 << 12, 1 << 20, torch.device("meta"))
    assert histories.starts(torch.tensor([4095], dtype=torch.int32)).tolist() == [4095 << 20]
