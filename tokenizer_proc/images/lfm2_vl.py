"""The image processor of LFM2-VL, which transformers has for torchvision alone.

An image becomes patches of whole sides: a small one as it is, a large one in tiles, and once more
as a whole. Pillow resizes it; in all else the patches are those of transformers'
`Lfm2VlImageProcessor`.
"""

import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL import Image

Size = tuple[int, int]  # width and height, as Pillow has them
BILINEAR = 2  # Pillow's


class Lfm2VlImageProcessor(msgspec.Struct, kw_only=True, frozen=True):
    """The settings of a published `preprocessor_config.json`, as far as they matter here."""

    encoder_patch_size: int = 16
    downsample_factor: int = 2  # patches of a row of the decoder, each way
    min_image_tokens: int = 64  # of an image that is no tile
    max_image_tokens: int = 256
    do_image_splitting: bool = True
    min_tiles: int = 2
    max_tiles: int = 10
    tile_size: int = 512
    use_thumbnail: bool = True
    max_pixels_tolerance: float = 2.0  # a larger image is cut into tiles
    resample: int = BILINEAR
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    def __call__(
        self,
        image: "Image.Image",
        return_tensors: str = "np",
        do_image_splitting: bool | None = None,
    ) -> dict[str, NDArray[Any]]:
        """Return the patches of an RGB image, tile by tile, short tiles padded with zeros.

        Args:
            return_tensors: numpy's, as all are here.
            do_image_splitting: overrides the setting.
        """
        assert return_tensors == "np"
        splits = self.do_image_splitting if do_image_splitting is None else do_image_splitting
        whole = self.whole_size(image.size)
        columns, rows = self.grid(image.size) if splits and self.is_large(image.size) else (1, 1)
        side = self.tile_size
        tiles = []
        if columns * rows > 1:
            resized = image.resize((columns * side, rows * side), self.resample)
            corners = [(x * side, y * side) for y in range(rows) for x in range(columns)]
            tiles = [resized.crop((x, y, x + side, y + side)) for x, y in corners]
        if self.use_thumbnail or not tiles:
            tiles.append(image.resize(whole, self.resample))
        patches = [self.patches(tile) for tile in tiles]
        lengths = [len(one) for one in patches]
        pixels = np.zeros((len(tiles), max(lengths), patches[0].shape[1]), np.float32)
        mask = np.zeros(pixels.shape[:2], np.uint8)
        for place, one in enumerate(patches):
            pixels[place, : len(one)] = one
            mask[place, : len(one)] = 1
        patch = self.encoder_patch_size
        return {
            "pixel_values": pixels,
            "pixel_attention_mask": mask,
            "spatial_shapes": np.array([[t.height // patch, t.width // patch] for t in tiles]),
            "image_rows": np.array([rows]),
            "image_cols": np.array([columns]),
        }

    @property
    def _row_side(self) -> int:
        """Pixels of a side of what one row of the decoder sees."""
        return self.encoder_patch_size * self.downsample_factor

    def is_large(self, size: Size) -> bool:
        """Whether an image is cut into tiles."""
        width, height = (
            max(self.encoder_patch_size, round(side / self._row_side) * self._row_side)
            for side in size
        )
        most = self.max_image_tokens * self._row_side**2
        return width * height > most * self.max_pixels_tolerance

    def whole_size(self, size: Size) -> Size:
        """Return the size nearest to an image's that whole rows fill, in number within limits."""
        unit = self._row_side
        least, most = self.min_image_tokens * unit**2, self.max_image_tokens * unit**2
        width, height = (max(unit, round(side / unit) * unit) for side in size)
        scale = math.sqrt(size[0] * size[1])
        if width * height > most:
            shrink = scale / math.sqrt(most)
            width, height = (max(unit, math.floor(n / shrink / unit) * unit) for n in size)
        elif width * height < least:
            grow = math.sqrt(least) / scale
            width, height = (math.ceil(n * grow / unit) * unit for n in size)
        return width, height

    def grid(self, size: Size) -> Size:
        """Return columns and rows of tiles: of nearest shape, and of two such of the larger one
        where the image would fill half of it."""
        width, height = size
        sides = range(1, self.max_tiles + 1)
        grids = [(x, y) for x in sides for y in sides if self.min_tiles <= x * y <= self.max_tiles]
        best, least = (1, 1), math.inf
        for columns, rows in sorted(grids, key=math.prod):
            difference = abs(width / height - columns / rows)
            fills = width * height > 0.5 * self.tile_size**2 * columns * rows
            if difference < least or (difference == least and fills):
                best, least = (columns, rows), difference
        return best

    def patches(self, tile: "Image.Image") -> NDArray[np.float32]:
        """Return a tile's patches, row by row, each with its pixels in order and colors last."""
        side = self.encoder_patch_size
        mean, std = (np.array(n, np.float32) for n in (self.image_mean, self.image_std))
        pixels = np.asarray(tile, np.float32) * np.float32(self.rescale_factor)
        cut = ((pixels - mean) / std).reshape(
            tile.height // side, side, tile.width // side, side, 3
        )
        return cut.transpose(0, 2, 1, 3, 4).reshape(-1, side * side * 3)
