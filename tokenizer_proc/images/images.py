"""The images of a conversation, from message parts to messages for the engine.

They are prepared in order, and a prompt's are sent together. One that has been given up meanwhile,
while its request was laid aside, is prepared again.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from headrace.board.board import Slot
from headrace.board.fields import TokenizerField
from headrace.errors import InvalidValue, Unsupported
from headrace.ipc.messages import GenerateRequest, Image
from headrace.tokenizer_proc.images.sources import ImageSource, Remote, image_parts, sources_of
from headrace.tokenizer_proc.jobs.stages import Encoding, Ids, Sequences, Text, ids_of
from headrace.tokenizer_proc.requests.openai import RequestMessage
from headrace.tokenizer_proc.requests.videos import MediaOptions

if TYPE_CHECKING:  # loaded only for models that take images
    from headrace.tokenizer_proc.images.fetches import ImageFetches
    from headrace.tokenizer_proc.images.processor import ImageProcessor
    from headrace.tokenizer_proc.images.store import ImageStore, Stored

MARK = re.compile(r"\[\w+\]")  # a special token of Mistral AI's


class Images:
    """Images of conversations, in a process that prepares them.

    Args:
        image_token: stands for each row of an image.
        max_images: of a request.
        special_tokens: ids by name, for prompts that are encoded before their images are written.
        look: sees to it that nothing counts as sent to an engine that has died.
        wait: returns after a moment in which the engine may be done with some.
        check: raises `Abandoned` where the client of a request has left.
        slot: of this process, where it is counted.
        fetches: None is that nothing is fetched.
    """

    def __init__(
        self,
        processor: "ImageProcessor",
        store: "ImageStore",
        image_token: int,
        max_images: int,
        *,
        look: Callable[[], None],
        wait: Callable[[], None],
        check: Callable[[int], None],
        slot: Slot,
        fetches: "ImageFetches | None" = None,
        special_tokens: Mapping[str, int] | None = None,
    ) -> None:
        self._processor = processor
        self._store = store
        self._image_token = image_token
        self._max_images = max_images
        self._look = look
        self._wait = wait
        self._check = check
        self._slot = slot
        self._fetches = fetches
        self._special_tokens = special_tokens or {}

    def of(
        self,
        request: int,
        messages: Sequence[RequestMessage],
        salt: bytes = b"",
        media: MediaOptions | None = None,
    ) -> "PromptImages":
        """Return the images of a conversation, of which nothing has been decoded.

        Parts that are videos become texts, with places for their frames.

        Args:
            request: the id of the request that has them.
            salt: only images of the same salt are known to be the same.
            media: when the frames of videos were.

        Raises:
            RequestError: some are not taken; the text names the part.
        """
        named = sources_of(
            messages,
            self._max_images,
            self._fetches is not None,
            self._processor.spelling.video,
            None if media is None else media.video,
        )
        return PromptImages(self, named, request, salt)

    def take_fetched(self) -> None:
        """Let those go on whose images have been fetched."""
        if self._fetches is not None:
            self._fetches.look()

    def fetch(self, sources: Sequence[ImageSource | Remote]) -> Encoding[list[ImageSource]]:
        """Return images, those fetched that are elsewhere.

        Raises:
            RequestError: one cannot be fetched, or is none; the text names its part.
        """
        remotes = [source for source in sources if isinstance(source, Remote)]
        if not remotes:
            return [source for source in sources if isinstance(source, ImageSource)]
        assert self._fetches is not None
        files = iter((yield from self._fetches.files(remotes)))
        return [s.source(*next(files)) if isinstance(s, Remote) else s for s in sources]

    def prepare(self, sources: Sequence[ImageSource], request: int, salt: bytes) -> "list[Stored]":
        """Return images in the arena, prepared if they are not there.

        Raises:
            Abandoned: the client of `request` has left.
            InvalidValue: one cannot be decoded, or there will never be room for all.
        """
        from headrace.tokenizer_proc.images.store import NeverFits

        self._look()
        try:
            return self._in_order(sources, request, salt)
        except NeverFits:
            self._store.clear()  # in an empty arena, no image is in another's way
        try:
            return self._in_order(sources, request, salt)
        except NeverFits as error:
            where = sources[0].where
            raise InvalidValue(f"{where}: with those after it, takes {error}", where) from error

    def _in_order(
        self, sources: Sequence[ImageSource], request: int, salt: bytes
    ) -> "list[Stored]":
        """Return images in the arena; raises NeverFits, too."""

        def wait() -> None:
            self._check(request)
            self._wait()

        found: list[Stored] = []
        for source in sources:
            self._check(request)
            key = self._processor.key(source, salt)
            stored = self._store.find(key)
            self._slot.add(TokenizerField.IMAGES)
            self._slot.add(TokenizerField.FOUND_IMAGES, stored is not None)
            if stored is None:
                prepared = self._processor.prepare(source)
                stored = self._store.put(key, prepared, beside=found, wait=wait)
            found.append(stored)
        return found

    def write(self, text: str, images: "Sequence[Stored]") -> str:
        """Write images where a chat template has left places for them."""
        pieces = text.split(self._processor.spelling.placeholder)
        self._check_places(len(pieces) - 1, len(images))
        texts = [stored.text for stored in images]
        return "".join(part for pair in zip(pieces, [*texts, ""], strict=True) for part in pair)

    def write_ids(self, ids: Ids, images: "Sequence[Stored]") -> Ids:
        """Write images into a prompt that is encoded already, and has a token for each."""
        self._check_places(sum(id == self._image_token for id in ids), len(images))
        texts = iter(images)
        written: list[int] = []
        for id in ids:
            if id == self._image_token:
                written += [self._special_tokens[mark] for mark in MARK.findall(next(texts).text)]
            else:
                written.append(id)
        return ids_of(written)

    def find(self, ids: Ids, images: "Sequence[Stored]") -> list[Image]:
        """Return where in a prompt images are, their tensors still missing."""
        places = [place for place, id in enumerate(ids) if id == self._image_token]
        token = self._processor.spelling.token
        counts = [stored.text.count(token) for stored in images]
        self._check_places(len(places), sum(counts))
        found, first = [], 0
        for stored, count in zip(images, counts, strict=True):
            start, end = places[first], places[first + count - 1]
            found.append(Image(stored.key, start, end - start + 1, count, {}, stored.grid))
            first += count
        return found

    def send(self, images: "Sequence[Stored]", found: Sequence[Image]) -> list[Image]:
        """Return images with their tensors, which are counted as sent once more."""
        self._look()
        pairs = zip(images, found, strict=True)
        return [
            msgspec.structs.replace(image, tensors=self._store.send(stored))
            for stored, image in pairs
        ]

    def take_back(self, images: Sequence[Image]) -> None:
        """Count images as sent once less: their request is refused."""
        for image in images:
            self._store.take_back(image.tensors.values())

    def show(self) -> None:
        """Publish the arena's contents on the board."""
        slot, store = self._slot, self._store
        slot[TokenizerField.IMAGE_BYTES], slot[TokenizerField.SENT_IMAGE_BYTES] = (
            store.num_bytes,
            store.sent_bytes(),
        )

    def has(self, images: "Sequence[Stored]") -> bool:
        """Whether all of these are still in the arena."""
        return all(self._store.has(stored) for stored in images)

    def _check_places(self, num_places: int, num_wanted: int) -> None:
        """Refuse a text that has more, or fewer, places for images than there are images."""
        if num_places != num_wanted:
            spelling = self._processor.spelling
            names = " or ".join(dict.fromkeys((spelling.placeholder, spelling.token)))
            raise InvalidValue(
                f"messages: the prompt has {num_places} places where its images need {num_wanted}; "
                f"beside images no text may have {names} in it",
                "messages",
            )


class PromptImages:
    """The images of one prompt. Without any, nothing changes."""

    def __init__(
        self,
        images: Images | None,
        named: Sequence[ImageSource | Remote],
        request: int,
        salt: bytes = b"",
    ) -> None:
        self._images = images
        self._request = request
        self._salt = salt
        self._named = named
        self._sources: list[ImageSource] = []
        self._stored: list[Stored] = []
        self._found: list[Image] = []

    def __bool__(self) -> bool:
        return bool(self._named)

    def written(self, prompt: Text) -> Encoding[Text]:
        """Prepare the images, and return the rendered conversation with them written out."""
        if not self._named:
            return prompt
        assert self._images is not None
        self._sources = yield from self._images.fetch(self._named)
        self._stored = self._images.prepare(self._sources, self._request, self._salt)
        written = prompt._replace(text=self._images.write(prompt.text, self._stored))
        if prompt.ids is None:
            return written
        return written._replace(ids=self._images.write_ids(prompt.ids, self._stored))

    def find(self, ids: Ids) -> None:
        """Find their positions in the prompt."""
        if self._sources:
            assert self._images is not None
            self._found = self._images.find(ids, self._stored)

    def sent(self, sequences: Sequences) -> Sequences:
        """Return the sequences of a prompt with its images. Nothing may come between this and
        their being sent."""
        if not self._sources:
            return sequences
        assert self._images is not None
        if not self._images.has(self._stored):
            self._stored = self._images.prepare(self._sources, self._request, self._salt)
        requests: list[GenerateRequest] = []
        for request in sequences.requests:
            images = self._images.send(self._stored, self._found)
            requests.append(msgspec.structs.replace(request, images=images))
        return Sequences(requests, sequences.prompts)


def none_of(
    takes_images: bool,
    request: int,
    messages: Sequence[RequestMessage],
    _salt: bytes = b"",
    _media: MediaOptions | None = None,
) -> PromptImages:
    """Return no images: this process prepares none.

    Args:
        takes_images: the model does.

    Raises:
        Unsupported: there are some, of a request that was not seen to have them.
    """
    for where, _ in image_parts(messages):
        if not takes_images:
            raise Unsupported(f"{where}: this model takes no images", where)
        raise Unsupported(
            f"{where}: images are found by the name 'image_url' or 'video_url', or by Anthropic's "
            "'image', in the body; escape none of it",
            where,
        )
    return PromptImages(None, [], request)
