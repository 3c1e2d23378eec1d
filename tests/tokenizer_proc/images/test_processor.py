"""Images become what transformers makes of them, pixels and prompt, and do no harm."""

import io
import json
import shutil
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_images import THIN
from image_parts import encoded
from image_reference import transformers_processor, video_text
from PIL import Image
from tiny_vision import FAMILIES, GRIDS, IMAGE_PROCESSORS, picture
from transformers.image_utils import load_image

from headrace.errors import InvalidValue, ModelError
from headrace.system.cpu_limit import CpuLimit
from headrace.tokenizer_proc.encoding.encoder import Encoder
from headrace.tokenizer_proc.images.header import read_header
from headrace.tokenizer_proc.images.lane import load_processor
from headrace.tokenizer_proc.images.processor import (
    CPU_S,
    ImageProcessor,
    decoded,
    stored_processor,
)
from headrace.tokenizer_proc.images.sources import ImageSource
from headrace.tokenizer_proc.requests.videos import Video

LARGE = encoded(picture(4, 3000, 3000), "JPEG")
TOO_THIN = {"mistral3": THIN, "pixtral": THIN[1:]}  # a side becomes no patch
WHERE = "messages[0].content[0].image_url"
Folder = Callable[[str], Path]


def source(data: bytes, is_low: bool = False) -> ImageSource:
    header = read_header(data)
    assert header is not None
    return ImageSource(data, header, WHERE, is_low)


@pytest.fixture(scope="module")
def processors(vision_folder: Folder) -> Callable[[str], ImageProcessor]:
    made: dict[str, ImageProcessor] = {}

    def processor(family: str) -> ImageProcessor:
        if family not in made:
            folder = vision_folder(family)
            made[family] = load_processor(folder, Encoder(str(folder)))
        return made[family]

    return processor


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "smolvlm"])
@pytest.mark.parametrize("size", [(80, 60), (30, 31), (61, 200)])
def test_an_image_becomes_what_transformers_makes_of_it(
    family: str, size: tuple[int, int], vision_folder: Folder, processors: Any
) -> None:
    image, folder = picture(1, *size), vision_folder(family)
    prepared = processors(family).prepare(source(encoded(image)))
    reference = transformers_processor(folder, family)
    options = {"add_special_tokens": False} if family.startswith("paligemma") else {}
    text = [processors(family).spelling.placeholder]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PaliGemma's makes arrays of tensors
        expected = reference(images=[[image]], text=text, **options)
    end = "<s>\n" if options else ""  # where no text follows
    ids = reference.tokenizer(prepared.text + end, **options)["input_ids"]
    assert ids == list(expected["input_ids"][0])
    for name, tensor in prepared.tensors.items():
        wanted = np.asarray(expected[name])
        assert tensor.flags.c_contiguous and tensor.dtype.str[1:] in ("f4", "i8", "u1")
        np.testing.assert_array_equal(tensor, wanted.reshape(tensor.shape))


def test_only_positions_in_three_parts_need_a_grid(processors: Any) -> None:
    data = source(encoded(picture(1, 90, 60)))
    for family in IMAGE_PROCESSORS:
        prepared = processors(family).prepare(data)
        if family in GRIDS:
            height, width = prepared.tensors["image_grid_thw"][0, 1:] // 2
            assert prepared.grid == [1, height, width]
            token = processors(family).spelling.token
            assert prepared.text.count(token) == height * width
        else:
            assert prepared.grid == []


def test_smolvlm_is_written_as_idefics3(vision_folder: Folder, processors: Any) -> None:
    # Its own processor needs a package that no other model does.
    data = source(encoded(picture(2, 90, 40)))
    first, second = (processors(family).prepare(data) for family in ("smolvlm", "idefics3"))
    assert first.text == second.text
    for name, tensor in first.tensors.items():
        np.testing.assert_array_equal(tensor, second.tensors[name])


@pytest.mark.parametrize(
    ("fps", "duration", "places"),
    [
        (2.0, None, [0, 5, 130]),
        (0.001, 90_061.5, [7]),
        (24.0, 3.0, [*range(21)]),
        (1.0, None, [*range(120)]),
    ],
)
def test_a_video_is_written_as_by_transformers(
    fps: float, duration: float | None, places: list[int], vision_folder: Folder, processors: Any
) -> None:
    spelling = processors("smolvlm").spelling
    reference = transformers_processor(vision_folder("smolvlm"), "smolvlm")
    expected = video_text(
        reference,
        len(places),
        fps=fps,
        frames_indices=places,
        duration=duration,
        total_num_frames=places[-1] + 1,
    )
    times = [place / fps for place in places]
    video = Video(["frame"] * len(places), times, times[-1] if duration is None else duration)
    whole = processors("smolvlm").prepare(source(encoded(picture(1)), is_low=True)).text
    assert spelling.video(video).replace(spelling.placeholder, whole) == expected
    assert processors("idefics3").spelling.video is None


@pytest.mark.parametrize("family", IMAGE_PROCESSORS)
def test_low_detail_is_fewer_tokens_where_a_model_can(family: str, processors: Any) -> None:
    is_fewer = family in (
        "smolvlm",
        "idefics3",
        "internvl",
        "lfm2_vl",
    )  # others' are small as they are
    processor, data = processors(family), encoded(picture(1, 300, 200))
    token = processor.spelling.token
    full, low = (processor.prepare(source(data, is_low)) for is_low in (False, True))
    assert 0 < low.text.count(token) <= full.text.count(token)
    assert (low.text.count(token) < full.text.count(token)) == is_fewer
    keys = {processor.key(source(data, is_low)) for is_low in (False, True)}
    assert len(keys) == 1 + is_fewer


@pytest.mark.parametrize(
    ("least", "most", "is_fewer"),
    [(3136, 12_845_056, True), (3136, 100_000, False), (1_000_000, 12_845_056, True)],
)
def test_low_detail_of_qwens_is_no_more_than_the_processor_s_own(
    least: int, most: int, is_fewer: bool, vision_folder: Folder, tmp_path: Path
) -> None:
    folder = shutil.copytree(vision_folder("qwen2_5_vl"), tmp_path / "qwen")
    file = folder / "preprocessor_config.json"  # as published ones have it, older than "size"
    settings = json.loads(file.read_text()) | {"min_pixels": least, "max_pixels": most}
    del settings["size"]
    file.write_text(json.dumps(settings))
    processor, data = load_processor(folder, Encoder(str(folder))), encoded(picture(1, 1120, 700))
    texts = [processor.prepare(source(data, is_low)).text for is_low in (False, True)]
    full, low = (text.count("<|image_pad|>") for text in texts)
    assert (low < full) == is_fewer
    assert 0 < low <= min(most, 512 * 512) // 28**2


def test_a_key_is_of_the_bytes(processors: Any) -> None:
    first, second = encoded(picture(1)), encoded(picture(1), compress_level=0)
    key = processors("smolvlm").key
    assert key(source(first)) == key(source(first)) != key(source(second))
    assert len(key(source(first))) == 16


def png_with(mode: str) -> bytes:
    return encoded(picture(3).convert(mode))


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter to the right
    return encoded(picture(3), "JPEG", exif=exif)


def with_preview() -> bytes:
    """Return what many cameras make: a JPEG with a smaller one behind it (MPO)."""
    preview = picture(3).resize((20, 15))
    return encoded(picture(3), "MPO", save_all=True, append_images=[preview])


@pytest.mark.parametrize(
    "data",
    [png_with("RGBA"), png_with("L"), png_with("P"), png_with("1"), turned(), with_preview()],
)
def test_pixels_are_those_that_transformers_loads(data: bytes) -> None:
    expected = load_image(Image.open(io.BytesIO(data)))
    np.testing.assert_array_equal(np.asarray(decoded(source(data))), np.asarray(expected))


def moving(format: str) -> bytes:
    return encoded(picture(1), format, save_all=True, append_images=[picture(2)])


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_no_picture(format: str) -> None:
    decoded(source(encoded(picture(1), format)))
    with pytest.raises(InvalidValue, match=r"image_url: is an animation; send one picture") as no:
        decoded(source(moving(format)))
    assert no.value.param == WHERE


def two_sizes() -> bytes:
    """Return a GIF whose frame is larger than its screen."""
    data = bytearray(encoded(picture(1), "GIF"))
    data[6:10] = b"\x05\0\x05\0"
    return bytes(data)


BROKEN = [
    encoded(picture(1))[:-300],
    encoded(picture(1), "JPEG")[:400] + b"\0" * 200,
    encoded(picture(1), "WEBP")[:-50],
    encoded(picture(1), "GIF")[:-500],
    encoded(picture(1))[:41] + b"\xff" * 300,
    b"\x89PNG\r\n\x1a\n" + b"\0\0\0\x0dIHDR\0\0\0\x09\0\0\0\x09\x08\x63\0\0\0" + bytes(40),
    b"RIFF\x40\0\0\0WEBPVP8X" + bytes(40),
    two_sizes(),
]


@pytest.mark.parametrize("data", BROKEN)
def test_a_broken_image_is_refused_by_its_part(data: bytes, processors: Any) -> None:
    with pytest.raises(InvalidValue, match=r"^messages\[0\]\.content\[0\]\.image_url: ") as no:
        processors("smolvlm").prepare(source(data))
    assert no.value.param == WHERE
    assert len(str(no.value)) < 200


@pytest.mark.parametrize("family", FAMILIES)
def test_every_processor_bears_images_that_lie(
    family: str, processors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor, good = processors(family), source(encoded(picture(1)))
    before = processor.prepare(good)
    for data in (*BROKEN, *map(moving, ("GIF", "WEBP", "PNG"))):
        with pytest.raises(InvalidValue):
            processor.prepare(source(data))
    for size in THIN:
        thin = source(encoded(picture(2, *size)))
        if size in TOO_THIN.get(family, []):
            with pytest.raises(InvalidValue, match="pixels is not taken by this model"):
                processor.prepare(thin)
        else:
            assert processor.spelling.token in processor.prepare(thin).text
    with monkeypatch.context() as patch:
        patch.setattr(processor, "_cpu", CpuLimit(0.01, deadly_s=CPU_S))
        with pytest.raises(InvalidValue, match=r"takes more than 0\.01 s of CPU time to prepare"):
            processor.prepare(source(LARGE))
    after = processor.prepare(good)
    assert after.text == before.text
    for name, tensor in before.tensors.items():
        np.testing.assert_array_equal(tensor, after.tensors[name])


def forever(*_args: Any, **_options: Any) -> None:
    while True:
        pass


def gigabytes(*_args: Any, **_options: Any) -> bytearray:
    return bytearray(4 << 30)


def test_what_takes_too_long_or_too_much_is_refused(
    processors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor, data = processors("smolvlm"), source(encoded(picture(1)))
    with monkeypatch.context() as patch:
        patch.setattr(processor, "_cpu", CpuLimit(0.05, deadly_s=CPU_S))
        patch.setattr(processor, "_process", forever)
        with pytest.raises(InvalidValue, match=r"takes more than 0\.05 s of CPU time to prepare"):
            processor.prepare(data)
    with monkeypatch.context() as patch:
        patch.setattr(processor, "_process", gigabytes)
        with pytest.raises(InvalidValue, match=r"image_url: takes more memory than there is"):
            processor.prepare(data)
    assert processor.prepare(data).text


def test_a_text_that_is_a_bomb_is_no_picture(processors: Any) -> None:
    text = zlib.compress(bytes(100_000_000))
    chunk = b"zTXt" + b"k\0\0" + text
    png = encoded(picture(1))
    bomb = png[:33] + len(text + b"k\0\0").to_bytes(4, "big") + chunk
    bomb += zlib.crc32(chunk).to_bytes(4, "big") + png[33:]
    with pytest.raises(InvalidValue, match=r"cannot be decoded as "):
        processors("smolvlm").prepare(source(bomb))


def test_a_processor_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"its image processor cannot be loaded: "):
        stored_processor(tmp_path)


def test_a_processor_that_writes_images_otherwise_ends_the_start(
    vision_folder: Folder, tmp_path: Path
) -> None:
    folder = shutil.copytree(vision_folder("llava"), tmp_path / "llava")
    (folder / "processor_config.json").write_text('{"processor_class": "FuyuProcessor"}')
    with pytest.raises(ModelError, match="'processor_class' FuyuProcessor is not supp"):
        load_processor(folder, Encoder(str(folder)))


def test_no_family_needs_torch(vision_folder: Folder) -> None:
    folders = [str(vision_folder(family)) for family in IMAGE_PROCESSORS]
    code = (
        "import sys; from pathlib import Path\n"
        "from headrace.tokenizer_proc.images.processor import forgo_torch; forgo_torch()\n"
        "from headrace.tokenizer_proc.images.lane import load_processor\n"
        "from headrace.tokenizer_proc.encoding.encoder import Encoder\n"
        f"for folder in {folders}: load_processor(Path(folder), Encoder(folder))\n"
        "assert not [name for name in sys.modules if name.startswith('torch.')]"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
