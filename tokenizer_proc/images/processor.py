"""Image preprocessing: from file bytes to the tower's input, by Pillow and transformers.

The processor is the model's own, of transformers' PIL kind: it needs no torch, which takes 320 MB
and 3.5 s. What decoding and processing may take is bounded, in CPU time and in memory.
"""

import logging
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import InvalidValue, ModelError, in_a_line
from headrace.model.mmproj import FolderConfig
from headrace.system.cpu_limit import CpuLimit, CpuLimitExceeded
from headrace.system.memory_limit import MemoryLimit
from headrace.tokenizer_proc.images.image_tokens import ImageSpelling
from headrace.tokenizer_proc.images.lfm2_vl import Lfm2VlImageProcessor
from headrace.tokenizer_proc.images.sources import ImageSource

if TYPE_CHECKING:
    from PIL import Image

CPU_S = 10.0  # of an image; one of 50 million pixels takes 4
MEMORY_BYTES = 2 << 30
KEY_BYTES = 16
# A processor's values for the prompt.
NOT_FOR_TOWERS = frozenset(
    {
        "rows",
        "cols",
        "image_rows",
        "image_cols",
        "num_crops",
        "num_patches",
        "num_soft_tokens_per_image",
    }
)
WITH_BATCH = {"pixel_values": 5, "pixel_attention_mask": 4}  # lengths of an image's tiles, then

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """An image as the tower takes it, and as it is written in the prompt."""

    tensors: Mapping[str, NDArray[Any]]
    text: str
    grid: list[int]  # as in `messages.Image`


def forgo_torch() -> None:
    """Have this process never load torch, which transformers does wherever it finds it."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's way to say that
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that it is not there


def stored_processor(folder: Path) -> Any:
    """Return the image processor of a model's folder.

    Raises:
        ModelError: it cannot be loaded.
    """
    from transformers import AutoImageProcessor, ImageProcessingMixin

    load: Any = AutoImageProcessor.from_pretrained
    try:
        settings, _ = ImageProcessingMixin.get_image_processor_dict(folder, local_files_only=True)
        if str(settings.get("image_processor_type")).startswith(Lfm2VlImageProcessor.__name__):
            return msgspec.convert(settings, Lfm2VlImageProcessor)
        return load(folder, backend="pil", local_files_only=True)
    except (OSError, ValueError, ImportError, msgspec.ValidationError) as error:
        why = in_a_line(error)
        raise ModelError(f"{folder}: its image processor cannot be loaded: {why}") from error


def made_processor(made: FolderConfig) -> Any:
    """Return the image processor of a projector file."""
    import transformers

    return getattr(transformers, made.image_processor)(**made.image_settings)


class ImageProcessor:
    """A model's image processor, and how its images are written."""

    def __init__(self, process: Any, spelling: ImageSpelling) -> None:
        """Take one of transformers' image processors, of its PIL kind."""
        self.spelling = spelling
        self._cpu = CpuLimit(CPU_S)
        self._memory = MemoryLimit(MEMORY_BYTES)
        self._process = process
        self._low_detail = spelling.low_detail(process)

    def key(self, source: ImageSource, salt: bytes = b"") -> bytes:
        """Return the key of an image: others are other pixels, or are prepared otherwise.

        With a `salt`, 16 bytes at most, only requests that have the same one find it.
        """
        person = b"low" if source.is_low and self._low_detail else b""
        return blake2b(source.data, digest_size=KEY_BYTES, person=person, salt=salt).digest()

    def prepare(self, source: ImageSource) -> Prepared:
        """Decode and process an image.

        Raises:
            InvalidValue: it cannot be decoded, or takes too long or too much; the text names it.
        """
        where = source.where
        try:
            with self._cpu, self._memory:
                return self._prepared(source)
        except CpuLimitExceeded as error:
            raise InvalidValue(f"{where}: takes {error} to prepare", where) from error
        except MemoryError as error:
            raise InvalidValue(f"{where}: takes more memory than there is", where) from error

    def _prepared(self, source: ImageSource) -> Prepared:
        options = {**self.spelling.options, **(self._low_detail if source.is_low else {})}
        image = decoded(source)
        try:
            made = self._process(image, return_tensors="np", **options)
            text = self.spelling.spell(made)
        except ValueError as error:
            log.info("%s cannot be prepared: %r", source.where, error)
            size = f"{source.header.width}x{source.header.height}"
            raise InvalidValue(
                f"{source.where}: an image of {size} pixels is not taken by this model; "
                "send one that is nearer to a square, or larger",
                source.where,
            ) from error
        tensors = {n: compact(n, array) for n, array in made.items() if n not in NOT_FOR_TOWERS}
        return Prepared(tensors, text, self.spelling.grid(made))


def decoded(source: ImageSource) -> "Image.Image":
    """Return the pixels of an image, upright and RGB, as transformers' `load_image` has them."""
    from PIL import Image, ImageOps

    Image.MAX_IMAGE_PIXELS = None  # the header has been checked, against a limit of our own
    where, header = source.where, source.header
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata
            image = Image.open(BytesIO(source.data), formats=[header.format])
            if image.size == (header.width, header.height) and not moves(image):
                ImageOps.exif_transpose(image, in_place=True)
                return image if image.mode == "RGB" else image.convert("RGB")
            what = "is an animation; send one picture" if moves(image) else "has two sizes"
    except MemoryError:
        raise
    except Exception as error:  # Pillow's plugins raise whatever they stumble upon
        log.info("%s cannot be decoded: %r", where, error)
        why = f"cannot be decoded as {header.format}; it may be cut off"
        raise InvalidValue(f"{where}: {why}", where) from error
    raise InvalidValue(f"{where}: {what}", where)


def moves(image: "Image.Image") -> bool:
    """Whether an image has several frames; what cameras put beside a JPEG's first is a preview."""
    return image.format != "MPO" and bool(getattr(image, "is_animated", False))


def compact(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Return a tensor of one image as it travels: without a batch, masks as bytes."""
    if array.ndim == WITH_BATCH.get(name):
        array = array[0]
    if name == "pixel_attention_mask":
        array = array.astype(np.uint8)
    return np.ascontiguousarray(array)
