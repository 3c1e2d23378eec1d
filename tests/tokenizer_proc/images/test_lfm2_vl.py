"""LFM2-VL's image processor makes what transformers' makes by torchvision, as recorded."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tiny_vision import picture

from headrace.tokenizer_proc.images.lfm2_vl import Lfm2VlImageProcessor

RECORDED = json.loads((Path(__file__).parents[1] / "recorded" / "lfm2_vl_pixels.json").read_text())


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda c: f"{c['size']} {c['settings']}")
def test_patches_are_those_of_torchvision(case: dict[str, Any]) -> None:
    process = msgspec.convert(case["settings"], Lfm2VlImageProcessor)
    made = process(picture(7, *case["size"]))
    assert (made["image_rows"], made["image_cols"]) == ([case["rows"]], [case["columns"]])
    assert made["spatial_shapes"].tolist() == case["shapes"]
    lengths = [height * width for height, width in case["shapes"]]
    assert made["pixel_attention_mask"].sum(axis=1).tolist() == lengths
    pixels = made["pixel_values"][made["pixel_attention_mask"] == 1]
    levels = pixels.ravel()[:: case["step"]] * 127.5 + 127.5
    np.testing.assert_allclose(levels, case["levels"], atol=1.001)  # of 255
    assert np.abs(levels - case["levels"]).mean() < 0.1


def test_splitting_may_be_forgone_for_one_image() -> None:
    image, process = picture(7, 1280, 1024), Lfm2VlImageProcessor()
    tiles, whole = (
        process(image, do_image_splitting=splits)["spatial_shapes"] for splits in (None, False)
    )
    assert (len(tiles), len(whole)) == (3 * 3 + 1, 1)
    assert tiles[-1].tolist() == whole[0].tolist()
