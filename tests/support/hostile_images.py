"""Images that are none, lie about themselves or take too much, and why they are refused."""

from image_parts import data_url, encoded
from PIL import Image
from tiny_vision import picture

PNG = encoded(picture(1))
BOMB = PNG[:16] + (30_000).to_bytes(4, "big") * 2 + PNG[24:]
STRIP = encoded(Image.new("L", (1, 100_000)))
MOVING = encoded(picture(1), "GIF", save_all=True, append_images=[picture(2)])
SLOW = encoded(Image.new("L", (7000, 7000)), "JPEG", progressive=True)
SLOW += SLOW[SLOW.rindex(b"\xff\xda") :] * 3000  # each takes 30 ms
BAD = [
    (data_url(PNG[:-200]), "cannot be decoded"),
    (data_url(PNG[:12]), "ends before the header"),
    (data_url(STRIP), "1 x 100000 pixels"),
    (data_url(BOMB), "30000 x 30000 pixels"),
    (data_url(SLOW, "image/jpeg"), "7000 x 7000 pixels in 3"),
    (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "SVG"),
    (data_url(MOVING, "image/gif"), "animation"),
    (data_url(PNG, "image/jpeg"), "says that it is image/jpeg"),
    ("data:image/png;base64,!!!", "not base64"),
]
# Sides in pixels that are accepted everywhere, and that some image processors do not take.
THIN = [(1, 1), (1, 200), (200, 1), (3, 500), (500, 3)]
