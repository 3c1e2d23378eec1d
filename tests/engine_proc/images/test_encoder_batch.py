"""Images that wait go through the tower together, in their order, within a bound."""

import pytest

from headrace.engine_proc.images.encoder_batch import MAX_IMAGES, can_join
from headrace.ipc.messages import Image, Tensor


def image(*shape: int, dtype: str = "f4", **more: list[int]) -> Image:
    """Return an image with pixels of a shape, and with other tensors."""
    tensors = {"pixel_values": Tensor(0, 1, dtype, list(shape))}
    tensors |= {name: Tensor(0, 1, "i8", shape) for name, shape in more.items()}
    return Image(b"", 0, 1, 1, tensors)


def num_together(images: list[Image], max_numbers: int) -> int:
    """Return how many of the first go in one call."""
    count = 0
    while count < len(images) and can_join(images[count], images[:count], max_numbers):
        count += 1
    return count


def test_images_go_together_up_to_a_bound() -> None:
    images = [image(1, 3, 4, 4)] * 5  # of 48 numbers each
    bounds = {0: 1, 95: 1, 96: 2, 191: 3, 1000: 5}
    assert {bound: num_together(images, bound) for bound in bounds} == bounds


def test_an_image_beyond_the_bound_goes_alone() -> None:
    large, small = image(1, 3, 64, 64), image(1, 3, 4, 4)
    assert num_together([large, small], 1000) == 1
    assert num_together([small, large], 1000) == 1
    assert num_together([], 1000) == 0


def test_batch_takes_images_in_order() -> None:
    small, large = image(4, 1176, image_grid_thw=[1, 3]), image(64, 1176, image_grid_thw=[1, 3])
    assert num_together([small, large, small], 8 * 1176) == 1


@pytest.mark.parametrize(
    ("first", "second", "is_one_call"),
    [
        # LLaVA and Gemma 3 have one size; a processor may be told not to.
        (image(1, 3, 8, 8), image(1, 3, 8, 8), True),
        (image(1, 3, 8, 8), image(1, 3, 8, 9), False),
        # Tiles of SmolVLM and Idefics3 have one size, whosever they are.
        (
            image(5, 3, 8, 8, pixel_attention_mask=[5, 8, 8]),
            image(1, 3, 8, 8, pixel_attention_mask=[1, 8, 8]),
            True,
        ),
        (
            image(1, 3, 8, 8, pixel_attention_mask=[1, 8, 8]),
            image(1, 3, 9, 9, pixel_attention_mask=[1, 9, 9]),
            False,
        ),
        # Qwen2.5-VL takes patches of images of any size.
        (image(64, 1176, image_grid_thw=[1, 3]), image(16, 1176, image_grid_thw=[1, 3]), True),
        (image(64, 1176, image_grid_thw=[1, 3]), image(64, 1176), False),
        (image(1, 8), image(1, 8, dtype="f2"), False),
        # Pixtral and Mistral 3 have images of any size, which stands beside them.
        (image(1, 3, 8, 8, image_sizes=[1, 2]), image(1, 3, 8, 8, image_sizes=[1, 2]), True),
        (image(1, 3, 8, 8, image_sizes=[1, 2]), image(1, 3, 8, 9, image_sizes=[1, 2]), False),
    ],
)
def test_images_go_together_whose_tensors_can_be_joined(
    first: Image, second: Image, is_one_call: bool
) -> None:
    assert can_join(second, [first], 1 << 20) == is_one_call
    assert can_join(first, [second], 1 << 20) == is_one_call


def test_masks_and_grids_do_not_count() -> None:
    masked = image(1, 3, 4, 4, pixel_attention_mask=[1, 4, 4], image_grid_thw=[1, 3])
    assert num_together([masked] * 3, 96) == 2


def test_a_batch_has_only_so_many_images() -> None:
    assert num_together([image(1, 1)] * (MAX_IMAGES + 1), 1 << 20) == MAX_IMAGES
