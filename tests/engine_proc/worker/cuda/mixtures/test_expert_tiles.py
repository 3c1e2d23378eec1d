"""Each pair of a token and an expert that is here is in one tile, which is of that expert."""

import dataclasses

import pytest
import torch
from gpu_tests import first_of

from headrace.engine_proc.worker.cuda.mixtures.expert_tiles import (
    FEW,
    MANY,
    most_tiles,
    sort_by_expert,
    tile_of,
)
from headrace.engine_proc.worker.cuda.mixtures.router import choose_experts
from headrace.engine_proc.worker.models.specs.decoder_spec import MixtureSpec

OF_6 = MixtureSpec(num_experts=6, experts_per_token=2, intermediate_size=8)


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 150, 700])
@pytest.mark.parametrize("local", first_of(2, [range(2, 5), None, range(5, 6)]))
def test_tiles_hold_each_pair_once(
    num_tokens: int, local: range | None, device: torch.device
) -> None:
    mixture = dataclasses.replace(OF_6, local_experts=local)
    torch.manual_seed(0)
    logits = torch.randn(num_tokens, 6).to(device) + torch.arange(6, device=device) / 2
    kv_rows = torch.arange(num_tokens, device=device) - 1  # the first is padding
    choice = choose_experts(mixture, logits, None, kv_rows)
    tiles = sort_by_expert(mixture, choice, torch.float32)
    experts, found = choice.experts.flatten().tolist(), []
    count = int(tiles.count) if num_tokens else 0
    assert count <= len(tiles.table) == most_tiles(2 * num_tokens, len(mixture.own_experts), 64)
    for expert, first, end in tiles.table[:count].tolist():
        assert 0 < end - first <= tiles.tile.rows
        own = tiles.pairs[first:end].tolist()
        assert own == sorted(own)
        assert {experts[pair] for pair in own} == {mixture.own_experts[expert]}
        found += own
    assert sorted(found) == [i for i, own in enumerate(experts) if own in mixture.own_experts]


@pytest.mark.parametrize(
    ("num_pairs", "num_experts", "most"), [(8, 128, 8), (512, 128, 134), (65536, 128, 1150)]
)
def test_launches_have_few_empty_tiles(num_pairs: int, num_experts: int, most: int) -> None:
    assert most_tiles(num_pairs, num_experts, 64) == most


def test_experts_with_many_rows_have_larger_tiles() -> None:
    assert tile_of(64 * 128, 128, torch.bfloat16) == FEW
    assert tile_of(64 * 128 + 8, 128, torch.bfloat16) == MANY
