"""Images beside a projector file become what the folder's image processor makes of them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from image_parts import encoded
from mmproj_twins import ARCHITECTURES, mmproj_keys, tokenizer, write
from tiny_vision import TEXT, picture

from headrace.tokenizer_proc.encoding.encoder import Encoder
from headrace.tokenizer_proc.images.header import read_header
from headrace.tokenizer_proc.images.lane import load_processor
from headrace.tokenizer_proc.images.sources import ImageSource


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_images_become_what_the_folder_makes_of_them(
    family: str, vision_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, architecture = vision_folder(family), ARCHITECTURES[family]
    keys = {f"{architecture}.embedding_length": TEXT["hidden_size"]} | tokenizer(folder, family)
    decoder = write(tmp_path / "decoder.gguf", architecture, keys, {})
    rows = {"mm.2.weight": np.zeros((TEXT["hidden_size"], 4), np.float32)}  # of LLaVA
    mmproj = write(tmp_path / "mmproj.gguf", "clip", mmproj_keys(folder, family), rows)
    processors = (
        load_processor(folder, Encoder(str(folder))),
        load_processor(decoder, Encoder(str(decoder)), str(mmproj)),
    )
    for size in [(80, 60), (30, 31), (61, 200)]:
        data = encoded(picture(1, *size))
        header = read_header(data)
        assert header is not None
        source = ImageSource(data, header, "messages[0]", False)
        expected, found = (processor.prepare(source) for processor in processors)
        assert (found.text, found.grid) == (expected.text, expected.grid)
        assert found.tensors.keys() == expected.tensors.keys()
        for name, tensor in found.tensors.items():
            np.testing.assert_array_equal(tensor, expected.tensors[name])
