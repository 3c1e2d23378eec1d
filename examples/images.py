"""A question about an image, with OpenAI's client: `python examples/images.py photo.jpg`.

Without a file, the image is a red circle. The server needs a model that takes images:
`launch_server MODEL`, for example HuggingFaceTB/SmolVLM-256M-Instruct.
"""

import base64
import io
import sys

from openai import OpenAI
from PIL import Image, ImageDraw


def red_circle() -> Image.Image:
    """Return a test image."""
    image = Image.new("RGB", (256, 256), "white")
    ImageDraw.Draw(image).ellipse((48, 48, 208, 208), fill="red")
    return image


image = Image.open(sys.argv[1]).convert("RGB") if len(sys.argv) > 1 else red_circle()
file = io.BytesIO()
image.save(file, "PNG")
url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
question = [
    {"type": "text", "text": "What is in this image?"},
    {"type": "image_url", "image_url": {"url": url}},
]

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
completion = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": question}],
    max_tokens=60,
)
print(completion.choices[0].message.content)
