"""What is drawn can be looked at, in every form."""

from array import array
from pathlib import Path

import pytest
from PIL import Image

from headrace.bench.connection import Record
from headrace.bench.load import LoadResult
from headrace.bench.plot import CURVE, HEIGHT, SCALE, SUFFIXES, TOP, WIDTH, write_plot

RECORDS = [
    Record(  # sent at once, each a second later than the one before
        i,
        0.0,
        0.0,
        i,
        i + 0.3,
        gaps=array("f", [0.1, 0.2]).tobytes(),
        output_tokens=3,
    )
    for i in range(1, 9)
]
RESULT = {"model_id": "a<b", "num_prompts": 8, "request_rate": "inf"}


def test_a_picture_has_a_curve_in_each_panel(tmp_path: Path) -> None:
    file = tmp_path / "plot.png"
    write_plot(file, LoadResult(0.0, RECORDS, [0.1]), RESULT)
    num_rows = 3
    with Image.open(file) as image:
        assert image.size == (2 * SCALE * WIDTH, SCALE * (TOP + num_rows * HEIGHT))
        for row in range(num_rows):
            for column in range(2):
                left, top = SCALE * WIDTH * column, SCALE * (TOP + HEIGHT * row)
                panel = image.crop((left, top, left + SCALE * WIDTH, top + SCALE * HEIGHT))
                colors = panel.getcolors(1 << 20)
                assert colors is not None
                assert tuple(bytes.fromhex(CURVE[1:])) in {color for _, color in colors}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_nothing_can_be_drawn(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"plot{suffix}"
    write_plot(file, LoadResult(0.0, [], []), RESULT)
    assert file.stat().st_size > 0


def test_texts_are_escaped(tmp_path: Path) -> None:
    for name in ("plot.svg", "plot.html"):
        write_plot(tmp_path / name, LoadResult(0.0, RECORDS, [0.1]), RESULT)
        text = (tmp_path / name).read_text()
        assert "a&lt;b, 8 requests" in text
        assert "a<b" not in text
        assert text.count("<polyline") == 6
