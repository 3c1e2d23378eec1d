"""Pages are drawn as a scanner has them, and no two images are alike."""

import io
from base64 import b64decode

import numpy as np
from PIL import Image

from headrace.bench.pages import NUM_PAGES, Pages, draw_page
from headrace.bench.workload import BenchPrompt, body_of


def test_a_page_is_a4_with_text_on_it() -> None:
    page = draw_page(50, np.random.default_rng(0))
    assert page.size == (414, 585)
    gray = np.asarray(page.convert("L"))
    assert gray.mean() > 180 and gray.min() < 90
    assert np.array_equal(np.asarray(draw_page(50, np.random.default_rng(0))), np.asarray(page))


def test_every_image_is_another_and_all_can_be_read() -> None:
    pages = Pages(20, np.random.default_rng(0))
    urls = [pages.url() for _ in range(2 * NUM_PAGES)]
    assert len(set(urls)) == len(urls)
    pixels = set()
    for url in urls:
        head, _, data = url.partition(",")
        assert head == "data:image/jpeg;base64"
        with Image.open(io.BytesIO(b64decode(data, validate=True))) as image:
            pixels.add(image.convert("L").tobytes())
    assert len(pixels) == NUM_PAGES


def test_a_prompts_images_come_before_its_text() -> None:
    body = body_of(BenchPrompt("text", 3, ("data:a", "data:b")), "chat", None, {})
    parts = b'[{"type":"image_url","image_url":{"url":"data:a"}},'
    parts += b'{"type":"image_url","image_url":{"url":"data:b"}},{"type":"text","text":"text"}]'
    assert b'"content":' + parts in body
    assert b'"content":"text"' in body_of(BenchPrompt("text", 3), "chat", None, {})
