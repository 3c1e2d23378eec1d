"""Messages between processes that prepare images and the fetcher."""

from msgspec import field

from headrace.ipc.messages import Message, Tensor


class Fetch(Message, tag="fetch", frozen=True):
    """The images of a request that are elsewhere: tokenizer -> fetcher."""

    id: int  # unique while the server lives
    tokenizer: int  # index of the process that is answered
    urls: list[str]
    is_suspect: bool = False  # is handled alone: a fetcher has died that had it among others
    request_id: str = ""  # as in `HttpRequest`


class Forget(Message, tag="forget", frozen=True):
    """The images of a `Fetch` are no longer needed: tokenizer -> fetcher."""

    id: int


class Fetched(Message, tag="fetched", frozen=True):
    """The result of a `Fetch`: fetcher -> tokenizer. All files, or the first failure."""

    id: int
    # Of bytes, in the fetcher's own arena: read once, then released.
    files: list[Tensor] = field(default_factory=list)
    mime_types: list[str] = field(default_factory=list)  # that servers claim, as "image/png"
    failed: int = -1  # the place of a URL in `Fetch.urls`,
    why: str = ""  # fit for the client


ToFetcher = Fetch | Forget
FromFetcher = Fetched
