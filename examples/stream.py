"""Text as it is generated, stopped after 200 characters, with Headrace's own client.

`cancel` frees the sequence on the server at once; so does leaving the `with` block.
"""

from headrace import Client

with Client("http://127.0.0.1:8000") as client:
    stream = client.stream_chat("Tell me a story about a lighthouse.", max_tokens=200)
    length = 0
    for text in stream:
        print(text, end="", flush=True)
        length += len(text)
        if length > 200:
            stream.cancel()
    print(" ...")
