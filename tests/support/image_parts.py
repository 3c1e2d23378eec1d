"""Images as clients send them."""

import base64
import io
from typing import Any

from PIL import Image


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """Return an image's file."""
    data = io.BytesIO()
    image.save(data, format, **options)
    return data.getvalue()


def data_url(data: bytes, mime_type: str = "image/png") -> str:
    """Return a URL that has its data in it."""
    return f"data:{mime_type};base64,{base64.b64encode(data).decode()}"


def image_part(url: str, **fields: Any) -> dict[str, Any]:
    """Return a part of a message."""
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def video_part(*frames: Image.Image) -> dict[str, Any]:
    """Return a part of a message that is a video, as JPEGs of its frames."""
    texts = [base64.b64encode(encoded(frame, "JPEG")).decode() for frame in frames]
    return {
        "type": "video_url",
        "video_url": {"url": f"data:video/jpeg;base64,{','.join(texts)}"},
    }


def message(*parts: dict[str, Any] | str) -> dict[str, Any]:
    """Return a user's message of texts and other parts."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return {"role": "user", "content": content}
