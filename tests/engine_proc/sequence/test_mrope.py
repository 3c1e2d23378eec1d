"""Positions in three parts are those of transformers."""

from typing import Any

import pytest
import torch
import transformers
from tiny_vision import IMAGE_TOKEN, vision_config

from headrace.engine_proc.sequence.mrope import Grid, MRopePositions

MERGE = 2  # patches of a row, each way


@pytest.fixture(scope="module")
def model() -> Any:
    with torch.device("meta"):
        return transformers.AutoModel.from_config(vision_config("qwen2_5_vl"))


@pytest.mark.parametrize(
    "parts",
    [
        [9],
        [3, (1, 2, 5), 4],
        [(1, 4, 3), 2, (1, 1, 1), 1, (1, 3, 7), 6],
    ],
)
def test_positions_are_those_of_transformers(parts: list[int | Grid], model: Any) -> None:
    ids: list[int] = []
    images: list[tuple[int, Grid]] = []
    for part in parts:
        if isinstance(part, int):
            ids += [7] * part
        else:
            images.append((len(ids), part))
            ids += [IMAGE_TOKEN] * (part[0] * part[1] * part[2])
    tokens = torch.tensor([ids])
    grids = torch.tensor([(t, h * MERGE, w * MERGE) for _, (t, h, w) in images])
    expected, delta = model.get_rope_index(
        tokens, (tokens == IMAGE_TOKEN).int(), image_grid_thw=grids if images else None
    )
    positions = MRopePositions(images)
    assert positions.of(0, len(ids)).tolist() == expected[:, 0].T.flatten().tolist()
    after = len(ids) + int(delta)
    assert positions.of(len(ids), 2).tolist() == [after] * 3 + [after + 1] * 3


def test_any_part_is_that_of_the_whole() -> None:
    positions = MRopePositions([(3, (1, 2, 4)), (13, (1, 3, 1))])
    whole = positions.of(0, 30).tolist()
    for start in range(25):
        assert positions.of(start, 5).tolist() == whole[3 * start : 3 * start + 15]
