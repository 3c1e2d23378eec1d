"""Image placeholders in prompts by model family: marks, and a token per row. Pure.

A chat template writes a placeholder for an image; what is written in its place depends on what
the processor has made of the image. As transformers' processors have it, character for character.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import product
from math import prod
from typing import Any

from headrace.errors import ModelError
from headrace.model.vision_families import siglip_config
from headrace.tokenizer_proc.images.number_words import in_words
from headrace.tokenizer_proc.requests.videos import Video

FAKE = "<fake_token_around_image>"  # of Idefics3, around each tile
WHOLE = "<global-img>"  # the image in one tile
# LLaVA-NeXT's, where a config names none: heights and widths in pixels.
ANYRES_GRIDS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]

Json = Mapping[str, Any]


@dataclass(frozen=True)
class ImageSpelling:
    """The image placeholders of one model."""

    placeholder: str  # a template's, of an image
    token: str  # that stands for a row
    spell: Callable[[Json], str]  # of what a processor has made of an image
    options: Json  # of the processor,
    # And more of them, for that processor, where few tokens are to be made of an image.
    low_detail: Callable[[Any], Json] = lambda _processor: {}
    # Frames, rows and columns that the tokens of an image are; none where they just follow.
    grid: Callable[[Json], list[int]] = lambda _made: []
    video: Callable[[Video], str] | None = None  # a video's text; None where there are none


def spelling_of(config: Json, settings: Json, token: Callable[[int], str]) -> ImageSpelling:
    """Return the spelling of a model.

    Args:
        config: its config.json, of a family of `headrace.model.vision_families`.
        settings: its processor's; may be empty.
        token: returns the text of a token.

    Raises:
        ModelError: its processor is one that writes images in some other way.
    """
    kind = settings.get("processor_class")
    if kind is not None and kind not in PROCESSORS:
        raise ModelError(f"processor_config.json: 'processor_class' {kind} is not supported")
    return FAMILIES[config["model_type"]](config, settings, token)


def tiles(config: Json, settings: Json, token: Callable[[int], str]) -> ImageSpelling:
    """Idefics3 and SmolVLM: an image is cut into rows of tiles, and seen as a whole after them."""
    image = token(config["image_token_id"])
    rows = image * settings.get("image_seq_len", 169)

    def spell(made: Json) -> str:
        (num_rows,), (num_columns,) = made["rows"][0], made["cols"][0]
        whole = f"{FAKE}{WHOLE}{rows}{FAKE}"
        if not (num_rows or num_columns):
            return whole
        lines = (
            "".join(f"{FAKE}<row_{i + 1}_col_{j + 1}>{rows}" for j in range(num_columns)) + "\n"
            for i in range(num_rows)
        )
        return f"{''.join(lines)}\n{whole}"

    options = {"return_row_col_info": True}
    video = partial(timed_frames, image) if config["model_type"] == "smolvlm" else None
    return ImageSpelling(
        image, image, spell, options, lambda _: {"do_image_splitting": False}, video=video
    )


def timed_frames(image: str, video: Video) -> str:
    """Return SmolVLM's text of a video, its frames as `image`, each below its time."""
    num_frames = in_words(len(video.frames))
    duration = timedelta(seconds=int(video.duration))
    minutes = [divmod(int(time), 60) for time in video.times]
    return (
        f"You are provided the following series of {num_frames} frames from a {duration} [H:MM:SS] "
        "video.\n" + "".join(f"\nFrame from {m:02d}:{s:02d}:{image}" for m, s in minutes) + "\n\n"
    )


def patches(config: Json, settings: Json, token: Callable[[int], str]) -> ImageSpelling:
    """LLaVA: a row is a patch of the image, which has always the same size but for Pixtral."""
    if config["vision_config"].get("model_type") == "pixtral":
        return lines(config, settings, token)
    image = token(config["image_token_index"])
    patch: int = settings.get("patch_size") or config["vision_config"]["patch_size"]
    num_more = further_rows(config, settings)

    def spell(made: Json) -> str:
        *_, height, width = made["pixel_values"].shape
        num_rows: int = height // patch * (width // patch) + num_more
        return image * num_rows

    return ImageSpelling(settings.get("image_token", image), image, spell, {})


def further_rows(config: Json, settings: Json) -> int:
    """Return how many more rows than patches LLaVA's processors count for an image."""
    strategy = settings.get("vision_feature_select_strategy") or config.get(
        "vision_feature_select_strategy", "default"
    )
    num_added: int = settings.get("num_additional_image_tokens", 0)
    return num_added - int(strategy == "default")


def anyres(config: Json, settings: Json, token: Callable[[int], str]) -> ImageSpelling:
    """LLaVA-NeXT: the whole image, then its tiles without their padding, line by line.

    A line of patches ends with a row that is learned.
    """
    image = token(config["image_token_index"])
    patch: int = settings.get("patch_size") or config["vision_config"]["patch_size"]
    grids: list[list[int]] = config.get("image_grid_pinpoints") or ANYRES_GRIDS
    num_more = further_rows(config, settings)

    def spell(made: Json) -> str:
        *_, tile_height, tile_width = made["pixel_values"].shape
        height, width = made["image_sizes"][0].tolist()
        num_lines, num_columns = tile_height // patch, tile_width // patch
        grid_height, grid_width = best_grid(height, width, grids)
        lines, columns = without_padding(
            height,
            width,
            grid_height // tile_height * num_lines,
            grid_width // tile_width * num_columns,
        )
        num_rows: int = num_lines * num_columns + num_more + lines * (columns + 1)
        return image * num_rows

    return ImageSpelling(settings.get("image_token", image), image, spell, {})


def best_grid(height: int, width: int, grids: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the size that keeps most of an image's pixels, and then the smallest such."""

    def rank(grid: Sequence[int]) -> tuple[int, int]:
        scale = min(grid[1] / width, grid[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - grid[0] * grid[1]

    best_height, best_width = max(grids, key=rank)
    return best_height, best_width


def without_padding(height: int, width: int, lines: int, columns: int) -> tuple[int, int]:
    """Return how many lines and columns of patches hold an image that is centered in them."""
    if width / height > columns / lines:
        kept = int(round(height * (columns / width), 7))
        return lines - (lines - kept) // 2 * 2, columns
    kept = int(round(width * (lines / height), 7))
    return lines, columns - (columns - kept) // 2 * 2


def grid(config: Json, settings: Json, token: Callable[[int], str]) -> ImageSpelling:
    """Qwen2.5-VL and later, GLM-4V: a row is some patches of the image, which keeps its shape."""
    image = token(config["image_token_id"])
    merged: int = config["vision_config"].get("spatial_merge_size", 2)

    def shape(made: Json) -> list[int]:
        frames, height, width = made["image_grid_thw"][0].tolist()
        return [frames, height // merged, width // merged]

    def spell(made: Json) -> str:
        num_rows: int = prod(shape(made))
        return image * num_rows

    return ImageSpelling(image, image, spell, {}, low_size, shape)


def lines(config: Json, settings: Json, token: Callable[[int], str]) -> ImageSpelling:
    """Pixtral and Mistral 3: a row is some patches; marks stand between lines of rows."""
    image = token(config["image_token_index"])
    side: int = settings.get("patch_size", 16) * settings.get("spatial_merge_size", 1)
    between: str = settings.get("image_break_token", "[IMG_BREAK]")
    end: str = settings.get("image_end_token", "[IMG_END]")

    def spell(made: Json) -> str:
        height, width = made["image_sizes"][0].tolist()
        if config["model_type"] == "mistral3" and height == width == side:
            raise ValueError("transformers' module fails at an image of one row")
        return between.join([image * (width // side)] * (height // side)) + end

    placeholder = settings.get("image_token", image)
    return ImageSpelling(placeholder, image, spell, {"patch_size": side}, low_edge)


def low_edge(processor: Any) -> Json:
    """Return options that make an image's sides short, where the processor does not by itself."""
    edge = processor.size.longest_edge
    return {"size": {"longest_edge": LOW_EDGE}} if edge and edge > LOW_EDGE else {}


def low_size(processor: Any) -> Json:
    """Return options that make an image small, where the processor does not by itself."""
    size = processor.size
    if size.longest_edge <= LOW_PIXELS:
        return {}
    least = min(size.shortest_edge, LOW_PIXELS)
    return {"size": {"shortest_edge": least, "longest_edge": LOW_PIXELS}}


def block(config: Json, settings: Json, token: Callable[[int], str]) -> ImageSpelling:
    """Gemma 3: as many rows for every image, on lines of their own."""
    begin, end = token(config["boi_token_index"]), token(config["eoi_token_index"])
    image = token(config["image_token_index"])
    num_rows = settings.get("image_seq_length") or config.get("mm_tokens_per_image", 256)
    text = f"\n\n{begin}{image * num_rows}{end}\n\n"
    return ImageSpelling(begin, image, lambda _made: text, {"do_pan_and_scan": False})


def prefix(config: Json, _settings: Json, token: Callable[[int], str]) -> ImageSpelling:
    """PaliGemma: a row for each patch of an image, at the beginning of a prompt."""
    image = token(config["image_token_index"])
    tower = siglip_config(config)
    text = image * (tower["image_size"] // tower["patch_size"]) ** 2
    return ImageSpelling(image, image, lambda _made: text, {})


def soft_tokens(config: Json, settings: Json, token: Callable[[int], str]) -> ImageSpelling:
    """Gemma 4: rows of patches that are pooled, of an image that keeps its shape."""
    begin, end = token(config["boi_token_id"]), token(config["eoi_token_id"])
    image = token(config["image_token_id"])

    def spell(made: Json) -> str:
        (num_rows,) = made["num_soft_tokens_per_image"]
        return f"{begin}{image * int(num_rows)}{end}"

    return ImageSpelling(image, image, spell, {}, few_soft_tokens)


def few_soft_tokens(processor: Any) -> Json:
    """Return options that make the fewest rows that there can be of an image."""
    return {"max_soft_tokens": LEAST_ROWS} if processor.max_soft_tokens > LEAST_ROWS else {}


def crops(config: Json, settings: Json, token: Callable[[int], str]) -> ImageSpelling:
    """InternVL: as many rows for every tile of an image, which follow each other."""
    image = token(config["image_token_id"])
    rows = image * settings.get("image_seq_length", 256)

    def spell(made: Json) -> str:
        return f"<img>{rows * len(made['pixel_values'])}</img>"

    options = {"crop_to_patches": True}
    return ImageSpelling(image, image, spell, options, lambda _: {"crop_to_patches": False})


def numbered_tiles(config: Json, settings: Json, token: Callable[[int], str]) -> ImageSpelling:
    """LFM2-VL: tiles, each with its row and column, and the image as a whole."""
    image = token(config["image_token_id"])
    merged: int = config.get("downsample_factor", 2)
    has_marks: bool = settings.get("use_image_special_tokens", True)

    def spell(made: Json) -> str:
        texts = [image * (height * width // merged**2) for height, width in made["spatial_shapes"]]
        if not has_marks:
            return "".join(texts)
        (num_rows,), (num_columns,) = made["image_rows"], made["image_cols"]
        marks = [""]
        if num_rows * num_columns > 1:
            places = product(range(1, num_rows + 1), range(1, num_columns + 1))
            marks = [f"<|img_row_{row}_col_{column}|>" for row, column in places]
            marks.append("<|img_thumbnail|>")
        inner = "".join(mark + text for mark, text in zip(marks, texts, strict=False))
        return f"<|image_start|>{inner}<|image_end|>"

    return ImageSpelling(image, image, spell, {}, lambda _: {"do_image_splitting": False})


PROCESSORS = (
    "Idefics3Processor",
    "SmolVLMProcessor",
    "LlavaProcessor",
    "LlavaNextProcessor",
    "PixtralProcessor",
    "Qwen2_5_VLProcessor",
    "Qwen3VLProcessor",
    "Glm4vProcessor",
    "Glm46VProcessor",
    "InternVLProcessor",
    "Gemma3Processor",
    "Gemma4Processor",
    "Lfm2VlProcessor",
    "PaliGemmaProcessor",
)
LEAST_ROWS = 70  # of Gemma 4, of an image
LOW_EDGE = 512  # OpenAI's "low"
LOW_PIXELS = LOW_EDGE * LOW_EDGE
FAMILIES = {
    "idefics3": tiles,
    "smolvlm": tiles,
    "llava": patches,
    "llava_next": anyres,
    "qwen2_5_vl": grid,
    "qwen3_vl": grid,
    "qwen3_vl_moe": grid,
    "glm4v": grid,
    "glm4v_moe": grid,
    "qwen3_5": grid,
    "qwen3_5_moe": grid,
    "internvl": crops,
    "mistral3": lines,
    "gemma3": block,
    "gemma4": soft_tokens,
    "lfm2_vl": numbered_tiles,
    "paligemma": prefix,
}
