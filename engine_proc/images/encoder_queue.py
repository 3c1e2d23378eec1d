"""The encoder queue: schedules the images of all live sequences for the vision worker. Pure.

A sequence gets rows of the encoder cache for all of its images or for none, by priority. It keeps
them to its end, since a preempted sequence needs the embeddings again and its pixels are freed.
Images are encoded in the same order; `encoder_batch.py` joins those of several sequences. Pixels
are released when the embedding has arrived. If a vision worker dies, its images are encoded again,
each alone. At its second death an image fails.
"""

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from headrace.engine_proc.images.encoder_batch import can_join
from headrace.engine_proc.images.encoder_cache import EncoderCache
from headrace.engine_proc.sequence.image_placeholder import ImagePlaceholder
from headrace.engine_proc.sequence.mrope import MRopePositions
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.ipc.messages import Image, Tensor
from headrace.ipc.worker_messages import Encode, Encoded

KEY_BYTES = 16
MAX_DEATHS = 2  # of vision workers that had an image at hand


@dataclass(eq=False, slots=True)
class EncoderJob:
    """An image to be encoded, from the pixels of any sequence that needs it."""

    key: bytes
    num_deaths: int = 0
    needed_by: list[tuple[Sequence, ImagePlaceholder]] = field(default_factory=list)


@dataclass(slots=True)
class Losses:
    """Sequences that cannot go on, some of them more than once."""

    gone: list[Sequence] = field(default_factory=list)  # their pixels are; they come again
    failed: list[tuple[Sequence, str]] = field(default_factory=list)  # and why


def by_turn(sequence: Sequence) -> tuple[int, int]:
    """Return a sequence's importance where it is first come, first served."""
    return 0, sequence.turn


class EncoderQueue:
    """All images of live sequences.

    Args:
        image_token: the id that stands for a row.
        release: returns a tensor that came with a request to the arena.
        are_whole: adjacent tokens of an image see each other.
        importance: a sequence's sort key; the least is served first.
        new_salt: of keys, where images are to be encoded once more from now on; else None. It is
            random: embeddings of before are on a disk, and other engines read them.
    """

    def __init__(
        self,
        pool: EncoderCache,
        image_token: int,
        release: Callable[[Tensor], None],
        are_whole: bool = False,
        importance: Callable[[Sequence], tuple[int, int]] = by_turn,
        new_salt: Callable[[], bytes | None] = lambda: None,
    ) -> None:
        self.pool = pool
        self._image_token = image_token
        self._release = release
        self._are_whole = are_whole
        self._importance = importance
        self._new_salt = new_salt
        self._salt = b""
        self._waiting: list[Sequence] = []  # for room, the most important first
        self._jobs: dict[bytes, EncoderJob] = {}
        self._in_progress: list[tuple[EncoderJob, Sequence]] = []  # and whose pixels they are
        self.num_queries = 0  # images that came, ...
        self.num_hits = 0  # ... and those that had come before

    @property
    def num_waiting(self) -> int:
        """Images to be encoded, those at hand included."""
        return len(self._jobs)

    @property
    def in_progress(self) -> list[int]:
        """The ids of sequences whose images are being encoded."""
        return [sequence.id for job, _ in self._in_progress for sequence, _ in job.needed_by]

    def enter(self, sequence: Sequence) -> None:
        """Start to track the images of a sequence."""
        if (salt := self._new_salt()) is not None:
            self._salt = salt
            self.pool.forget_idle()
        sequence.images = [
            ImagePlaceholder.of(
                image, self._key(image), sequence.tokens, self._image_token, self._are_whole
            )
            for image in sequence.request.images
        ]
        grids = [(p.places[0], p.image.grid) for p in sequence.images if p.image.grid]
        if grids:
            sequence.rope = MRopePositions(grids)
        insort(self._waiting, sequence, key=self._importance)
        self._admit()

    def _key(self, image: Image) -> bytes:
        """Return the key of an image's rows: another one after each reset."""
        if not self._salt:
            return image.key
        return blake2b(image.key, digest_size=KEY_BYTES, key=self._salt).digest()

    def _admit(self) -> None:
        """Allocate rows to waiting sequences, while there is room for the first."""
        while self._waiting and self.pool.can_hold(sizes_of(self._waiting[0])):
            sequence = self._waiting.pop(0)
            sizes = sizes_of(sequence)
            self.num_queries += len(sizes)
            self.num_hits += sum(map(self.pool.is_known, sizes))
            self.pool.hold(sizes)
            for placed in sequence.images:
                key = placed.key
                placed.rows = self.pool.rows(key)
                if self.pool.is_filled(key):
                    self._take(placed)
                else:
                    self._jobs.setdefault(key, EncoderJob(key)).needed_by.append((sequence, placed))

    def _take(self, placed: ImagePlaceholder) -> None:
        placed.is_ready = True
        self.dismiss([placed.image])

    def dismiss(self, images: Iterable[Image]) -> None:
        """Let go of the pixels of images."""
        for image in images:
            for tensor in image.tensors.values():
                self._release(tensor)

    def leave(self, sequence: Sequence) -> None:
        """Let go of all that a sequence has of its images."""
        self.dismiss(placed.image for placed in sequence.images if not placed.is_ready)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            keys = sizes_of(sequence)
            for key in keys:
                self._leave_job(key, sequence)
            self.pool.let_go(keys)
        sequence.images = []
        self._admit()

    def _leave_job(self, key: bytes, sequence: Sequence) -> None:
        job = self._jobs.get(key)
        if job is None:
            return
        job.needed_by = [need for need in job.needed_by if need[0] is not sequence]
        if not job.needed_by and all(job is not other for other, _ in self._in_progress):
            del self._jobs[key]

    def next_batch(self, max_numbers: int, fingerprint: str = "") -> Encode | None:
        """Choose the next batch to encode, if images wait and none is in progress.

        Args:
            max_numbers: as in `can_join`.
            fingerprint: of the KV store's files, once that is ready.
        """
        if self._in_progress:
            return None
        images: list[Image] = []
        keys: list[bytes] = []
        for job in sorted(self._jobs.values(), key=self._urgency):
            sequence, placed = job.needed_by[0]
            if images and (job.num_deaths or not can_join(placed.image, images, max_numbers)):
                break
            images.append(placed.image)
            keys.append(job.key)
            self.pool.hold({job.key: placed.image.num_rows})  # until there is an answer
            self._in_progress.append((job, sequence))
            if job.num_deaths:
                break
        if not images:
            return None
        rows = [self.pool.rows(key).tobytes() for key in keys]
        return Encode([image.tensors for image in images], rows, keys, fingerprint)

    def _urgency(self, job: EncoderJob) -> tuple[int, int]:
        """Return the importance of the most important sequence that needs an image."""
        return min(self._importance(sequence) for sequence, _ in job.needed_by)

    def take(self, answer: Encoded) -> Losses:
        """Take the vision worker's results for the last batch."""
        losses = Losses()
        for place, (job, source) in enumerate(self._in_progress):
            if place in answer.gone:
                losses.gone += [s for s, _ in job.needed_by if s is source]
            elif place in answer.failed:
                losses.failed += [(s, answer.failed[place]) for s, _ in job.needed_by]
            else:
                self.pool.fill(job.key)
                for _, placed in job.needed_by:
                    self._take(placed)
                job.needed_by = []
        self._end_batch()
        return losses

    def died(self) -> Losses:
        """Record the death of the vision worker, with its batch in progress."""
        losses = Losses()
        for job, _ in self._in_progress:
            job.num_deaths += 1
            if job.num_deaths == MAX_DEATHS:
                losses.failed += [(s, "the vision worker died of it") for s, _ in job.needed_by]
        self._end_batch()
        return losses

    def _end_batch(self) -> None:
        """End the batch in progress, and remove its jobs that no sequence needs any more."""
        for job, _ in self._in_progress:
            if not job.needed_by:
                del self._jobs[job.key]
            self.pool.let_go([job.key])
        self._in_progress = []
        self._admit()


def sizes_of(sequence: Sequence) -> dict[bytes, int]:
    """Return how many rows a sequence needs, by image."""
    return {placed.key: placed.image.num_rows for placed in sequence.images}
