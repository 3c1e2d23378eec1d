"""Sequences with images say what they would say alone, whatever becomes of vision workers."""

from array import array
from collections import Counter
from dataclasses import dataclass, field

import pytest
from engine_configs import engine_config
from hypothesis import given, settings
from hypothesis import strategies as st
from page_rows import page_rows

from headrace.engine_proc.child_processes.vision_client import num_area_rows
from headrace.engine_proc.images.encoder_cache import EncoderCache
from headrace.engine_proc.images.encoder_queue import EncoderQueue, Losses
from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.kv_cache.state_slots import StateSlots
from headrace.engine_proc.scheduling.result_reader import ResultReader
from headrace.engine_proc.scheduling.scheduler import Scheduler
from headrace.engine_proc.scheduling.scheduler_limits import SchedulerLimits
from headrace.engine_proc.scheduling.waiting_queue import Policy
from headrace.engine_proc.sequence.chunk import Chunk
from headrace.engine_proc.sequence.image_placeholder import ImagePlaceholder
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.engine_proc.step.step_builder import build_step
from headrace.ipc.messages import GenerateRequest, Image, Sampling, Tensor, request_id, request_of
from headrace.ipc.worker_messages import Encode, Encoded, Step, StepResult

IMAGE = 99  # the token
VOCABULARY = 11
MAX_IMAGE_ROWS = 5
MAX_NUMBERS = 100  # of images that are encoded together, each of which has one
Part = list[int] | int  # of a prompt: tokens, or which image


def rows_of(image: int) -> int:
    """Return how many rows an image has."""
    return 1 + image % MAX_IMAGE_ROWS


def embedding(image: int, row: int) -> int:
    """Stand in for a row of an image."""
    return 1000 + 100 * image + row


def next_token(inputs: list[int]) -> int:
    """Stand in for a model: a token that depends on every input before it and on their order."""
    state = 7
    for number in inputs:
        state = (state * 31 + number + 1) % 1000003
    return state % VOCABULARY


def alone(parts: list[Part], num_tokens: int) -> list[int]:
    """Return the model's output for a prompt without batch mates."""
    inputs: list[int] = []
    for part in parts:
        is_text = isinstance(part, list)
        inputs += part if is_text else [embedding(part, i) for i in range(rows_of(part))]
    for _ in range(num_tokens):
        inputs.append(next_token(inputs))
    return inputs[len(inputs) - num_tokens :]


class Rig:
    """A scheduler and its images, a worker and a vision worker that do as they are told."""

    def __init__(
        self,
        num_rows: int = 64,
        num_pages: int = 64,
        budget: int = 64,
        whole: bool = False,
        depth: int = 1,
        policy: Policy = Policy.FCFS,
        num_states: int = 0,
    ) -> None:
        self.embeddings = EncoderCache(num_rows)
        self.released: Counter[int] = Counter()  # by offset
        self.num_resets = self.num_due = 0
        self.images = EncoderQueue(
            self.embeddings, IMAGE, self._release, whole, policy.importance, self._new_salt
        )
        self.pool = PagePool(num_pages, 4)
        limits = SchedulerLimits(max_num_seqs=3, max_num_batched_tokens=budget, max_num_queued=4)
        slots = StateSlots(num_states)
        self.scheduler = Scheduler(self.pool, limits, policy, slots=slots, images=self.images)
        self.whole = whole
        self.depth = depth  # steps that are open at once
        self.open: list[tuple[list[Chunk], Step]] = []
        self.drawn = array("i")  # in the last step
        self.area = [-1] * num_rows
        self.cache = [[-1] * 4 for _ in range(num_pages)]
        self.pixels: list[int] = []  # which image is at which offset of the arena
        self.asked: Encode | None = None
        self.said: dict[int, list[int]] = {}
        self.finished: set[int] = set()
        self.lost: set[int] = set()
        self.batches: list[list[int]] = []  # images that were asked for

    def _new_salt(self) -> bytes | None:
        if not self.num_due:
            return None
        self.num_resets, self.num_due = self.num_resets + self.num_due, 0
        return b"%d" % self.num_resets

    def _release(self, tensor: Tensor) -> None:
        self.released[tensor.offset] += 1

    def add(self, parts: list[Part], max_tokens: int = 3, priority: int = 0) -> Sequence:
        tokens: list[int] = []
        images = []
        for part in parts:
            if isinstance(part, list):
                tokens += part
                continue
            size = rows_of(part)
            tensor = Tensor(len(self.pixels), 1, "f4", [1])
            self.pixels.append(part)
            images.append(Image(b"%d" % part, len(tokens), size, size, {"pixels": tensor}))
            tokens += [IMAGE] * size
        id = request_id(0, len(self.said))
        request = GenerateRequest(
            id, 0, max_tokens, Sampling(), [], b"", priority=priority, images=images
        )
        sequence = Sequence.of(request, array("I", tokens).tobytes())
        self.said[id] = []
        self.scheduler.add(sequence)
        return sequence

    def ask(self, max_numbers: int = MAX_NUMBERS) -> None:
        """Have the vision worker asked, if there is something to ask for."""
        asked = self.images.next_batch(max_numbers)
        if asked is not None:
            assert self.asked is None
            self.asked = asked
            self.batches.append([self.pixels[t["pixels"].offset] for t in asked.images])

    def answer(self, gone: list[int] | None = None, failed: dict[int, str] | None = None) -> Losses:
        """Have the vision worker answer."""
        assert self.asked is not None
        for place, (tensors, data) in enumerate(
            zip(self.asked.images, self.asked.rows, strict=True)
        ):
            if place not in (gone or []) and place not in (failed or {}):
                for i, row in enumerate(array("i", data)):
                    self.area[row] = embedding(self.pixels[tensors["pixels"].offset], i)
        self.asked = None
        return self._lose(self.images.take(Encoded(gone or [], failed or {})))

    def die(self) -> Losses:
        """Have the vision worker die, in the middle of writing what it was asked for."""
        for data in [] if self.asked is None else self.asked.rows:
            self.area[array("i", data)[0]] = -2
        self.asked = None
        return self._lose(self.images.died())

    def _lose(self, losses: Losses) -> Losses:
        for sequence in [*losses.gone, *(sequence for sequence, _ in losses.failed)]:
            self.lost.add(sequence.id)
            self.scheduler.abort(request_of(sequence.id))
        return losses

    def step(self) -> list[Chunk]:
        """Send a step, if there is one, and end the oldest unless another may be sent before.

        Returns:
            The chunks of the one that was sent.
        """
        chunks = self.scheduler.schedule()
        if chunks:
            self.open.append((chunks, build_step(chunks)))
            if len(self.open) < self.depth:
                return chunks
        if self.open:
            self._end_step(*self.open.pop(0))
        return chunks

    def _end_step(self, chunks: list[Chunk], step: Step) -> None:
        self._compute(step)
        if self.whole:
            for chunk in chunks:
                check_whole(chunk)
        outcome = ResultReader(StepResult(self.drawn.tobytes()), 0)
        for news in self.scheduler.update(chunks, outcome):
            news.sequence.has_started = True
            self.said[news.sequence.id] += news.tokens
            if news.finished is not None:
                self.finished.add(news.sequence.id)

    def _compute(self, step: Step) -> None:
        """Be the worker."""
        inputs = array("i", step.token_ids)
        for place, row in enumerate(array("i", step.token_sources)):
            if row >= 0:
                inputs[place] = self.drawn[row]
        for place, row in enumerate(array("i", step.embed_rows)):
            if row >= 0:
                assert inputs[place] == IMAGE
                inputs[place] = self.area[row]
        assert IMAGE not in inputs
        positions, owners = array("i", step.positions), array("i", step.sequences)
        pages = page_rows(step)
        for place, position in enumerate(positions):
            page, row = divmod(position, 4)
            self.cache[pages[owners[place]][page]][row] = inputs[place]
        self.drawn = array("i")
        for place in array("i", step.logit_rows):
            known = [number for page in pages[owners[place]] for number in self.cache[page]]
            self.drawn.append(next_token(known[: positions[place] + 1]))

    def lose(self) -> None:
        """Lose the worker, and with it all that was computed."""
        self.scheduler.lose_workers()
        self.scheduler.recompute()
        self.open.clear()
        self.cache = [[-1] * 4 for _ in self.cache]

    def run(self) -> None:
        """Go on until all is said."""
        while len(self.finished | self.lost) < len(self.said):
            self.ask()
            if self.asked is not None:
                self.answer()
            assert self.scheduler.has_work
            self.step()

    def check_empty(self) -> None:
        """Check that no page, row or image is in use."""
        assert self.pool.num_free == self.pool.num_pages
        assert self.embeddings.num_free == self.embeddings.num_rows
        assert self.images.num_waiting == 0
        assert self.released == Counter(range(len(self.pixels)))


def check_whole(chunk: Chunk) -> None:
    """A chunk ends in the middle of no image."""
    end = chunk.start + chunk.count
    for placed in chunk.sequence.images:
        assert not placed.places[0] < end <= placed.places[-1]


@dataclass(frozen=True)
class Script:
    """What comes when, and what the vision worker does at each step."""

    prompts: list[tuple[int, list[Part], int]] = field(default_factory=list)  # step, parts, tokens
    leaves: list[tuple[int, int]] = field(default_factory=list)  # step, which prompt's client
    deeds: list[str] = field(default_factory=list)
    losses: list[int] = field(default_factory=list)  # steps at which the worker dies


PARTS = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=6) | st.integers(0, 6), min_size=1, max_size=4
)
SCRIPTS = st.builds(
    Script,
    prompts=st.lists(
        st.tuples(st.integers(0, 8), PARTS, st.integers(1, 8)), min_size=1, max_size=6
    ),
    leaves=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), max_size=2),
    deeds=st.lists(st.sampled_from(["answer", "answer", "wait", "die", "gone", "fail", "reset"])),
    losses=st.lists(st.integers(0, 12), max_size=2),
)


class Story:
    """A script played on a rig."""

    def __init__(self, rig: Rig, script: Script) -> None:
        self.rig = rig
        self.script = script
        self.sequences: dict[int, Sequence] = {}  # by their places in the script
        self.left: set[int] = set()

    @property
    def is_over(self) -> bool:
        """Whether all is said."""
        return len(self.rig.finished | self.rig.lost | self.left) == len(self.script.prompts)

    def play(self, step: int) -> None:
        """Let happen what happens before a step."""
        for number, (when, parts, max_tokens) in enumerate(self.script.prompts):
            if when == step:
                self.sequences[number] = self.rig.add(parts, max_tokens)
        for when, number in self.script.leaves:
            if when == step and number in self.sequences:
                ended = self.rig.scheduler.abort(self.sequences[number].id)
                self.left |= {sequence.id for sequence in ended}
        self.rig.ask()
        self.do(self.script.deeds[step] if step < len(self.script.deeds) else "answer")
        if step in self.script.losses:
            self.rig.lose()

    def do(self, deed: str) -> None:
        """Have the vision worker do something."""
        self.rig.num_due += deed == "reset"
        if deed == "die":
            self.rig.die()
        elif self.rig.asked is not None and deed != "wait":
            gone, failed = [0] * (deed == "gone"), {0: "bad"} if deed == "fail" else {}
            self.rig.answer(gone, failed)

    def check(self) -> None:
        """Check that each sequence's output is, or begins, its output without batch mates."""
        for number, sequence in self.sequences.items():
            _, parts, max_tokens = self.script.prompts[number]
            said = self.rig.said[sequence.id]
            assert said == alone(parts, max_tokens)[: len(said)]
            assert (sequence.id in self.rig.finished) == (len(said) == max_tokens)


@settings(deadline=None)
@given(
    SCRIPTS,
    st.tuples(st.integers(20, 40), st.integers(9, 12), st.integers(8, 32)),
    st.booleans(),
    st.integers(1, 2),
    st.sampled_from([0, 2, 4, 6, 9]),
)
def test_batched_texts_equal_single_texts_and_nothing_leaks(
    script: Script, sizes: tuple[int, int, int], whole: bool, depth: int, num_states: int
) -> None:
    rig = Rig(*sizes, whole, depth, num_states=num_states)
    story = Story(rig, script)
    step = 0
    while step < 14 or not story.is_over:
        story.play(step)
        if rig.scheduler.has_work:
            rig.step()
        step += 1
        assert step < 1000, "nothing goes on any more"
    story.check()
    if rig.asked is not None:
        rig.answer()
    rig.check_empty()


def test_prompt_is_computed_up_to_its_first_missing_image() -> None:
    rig = Rig()
    sequence = rig.add([[1, 2, 3, 4, 5], 3, [6], 4, [7]])
    assert [(c.start, c.count) for c in rig.step()] == [(0, 5)]
    assert rig.step() == []
    assert not rig.scheduler.has_work
    assert sequence.num_computed == 5  # it keeps its pages
    rig.run()
    assert rig.said[sequence.id] == alone([[1, 2, 3, 4, 5], 3, [6], 4, [7]], 3)
    assert sequence.num_cached == 0
    rig.check_empty()


def test_sequence_waiting_for_an_image_takes_no_place() -> None:
    rig = Rig()
    for _ in range(5):
        rig.add([[1, 2], 3, [4]])
    text = rig.add([[5, 6, 7]])
    while text.id not in rig.finished:
        assert rig.step()
    assert len(rig.finished) == 1


def test_sequence_waiting_for_an_image_yields_its_last_pages() -> None:
    rig = Rig(num_pages=5)
    rig.add([[1] * 8, 3, [4]])
    rig.step()
    assert rig.pool.num_free == 3
    text = rig.add([[5] * 15], 5)
    while text.id not in rig.finished:
        assert rig.step()
    rig.run()
    rig.check_empty()


def test_sequence_waiting_for_an_image_yields_its_state() -> None:
    rig = Rig(num_states=4)
    waiting = rig.add([[1, 2, 3, 4, 5], 7])
    rig.step()
    others = [rig.add([[2, i]]) for i in range(2)]
    rig.step()
    assert (waiting.num_computed, len(rig.scheduler.waiting)) == (5, 1)
    rig.step()
    assert (waiting.num_computed, waiting.pages) == (0, array("i"))
    assert rig.scheduler.running == others, "two may run with four slots"
    rig.run()
    assert rig.said[waiting.id] == alone([[1, 2, 3, 4, 5], 7], 3)


def test_images_are_encoded_together_in_order_of_arrival() -> None:
    rig = Rig()
    rig.add([[1], 3, [1], 1])
    rig.add([[1], 2])
    rig.ask()
    assert rig.batches == [[3, 1, 2]]


def test_an_image_is_encoded_once() -> None:
    rig = Rig()
    rig.add([[1], 3, [2], 3])
    rig.add([[4], 3])
    rig.run()
    rig.add([[4], 3, [6]])
    rig.run()
    assert rig.batches == [[3]]
    assert (rig.images.num_queries, rig.images.num_hits) == (3, 2)
    rig.check_empty()


def test_an_image_is_encoded_again_after_a_reset() -> None:
    rig = Rig()
    rig.add([[1], 3, [2]])
    rig.ask()
    rig.num_due += 1
    rig.add([[4], 3, [6]])
    rig.answer()
    rig.run()
    rig.add([[4], 3])
    rig.run()
    assert rig.batches == [[3], [3]]
    assert [*rig.said.values()] == [alone([[a], 3, b], 3) for a, b in ((1, [2]), (4, [6]), (4, []))]
    rig.check_empty()


def test_pages_of_another_image_are_not_taken_for_ones_own() -> None:
    rig = Rig()
    for image in (3, 8, 3):  # of as many rows
        rig.add([[1, 2], image, [5] * 8])
        rig.run()
    first, second, third = rig.said
    assert rig.said[first] == rig.said[third] == alone([[1, 2], 3, [5] * 8], 3)
    assert rig.said[second] == alone([[1, 2], 8, [5] * 8], 3)
    assert rig.scheduler.counts.prefix_hits == 12


def test_cached_pages_past_an_image_need_no_encoding() -> None:
    rig = Rig(num_rows=4)
    rig.add([[1, 2], 3, [5] * 8])
    rig.run()
    rig.add([[1], 8])
    rig.run()
    again = rig.add([[1, 2], 3, [5] * 8], 1)
    rig.step()
    assert rig.said[again.id] == alone([[1, 2], 3, [5] * 8], 1)


def test_pixels_are_let_go_of_when_their_embedding_is_there() -> None:
    rig = Rig()
    rig.add([[1], 3])
    rig.ask()
    assert not rig.released
    rig.answer()
    assert rig.released == {0: 1}


def test_images_of_a_dead_vision_worker_are_retried_singly() -> None:
    rig = Rig()
    rig.add([[1], 3, [1], 1])
    rig.ask()
    assert rig.die() == Losses()
    rig.ask()
    rig.answer()
    rig.ask()
    assert rig.batches == [[3, 1], [3], [1]]
    lost = rig.die()
    assert [why for _, why in lost.failed] == ["the vision worker died of it"]
    rig.check_empty()


def test_failed_image_ends_only_requests_that_need_it() -> None:
    rig = Rig()
    rig.add([[1], 3])
    other = rig.add([[1], 2])
    rig.add([[2], 3])
    rig.ask()
    assert len(rig.answer(failed={0: "bad"}).failed) == 2
    rig.run()
    assert rig.finished == {other.id}
    rig.check_empty()


def test_of_two_with_the_same_image_one_may_have_lost_its_pixels() -> None:
    rig = Rig()
    first = rig.add([[1], 3])
    second = rig.add([[2], 3])
    rig.ask()
    assert rig.answer(gone=[0]).gone == [first]
    rig.run()
    assert rig.finished == {second.id}
    assert rig.batches == [[3], [3]]
    rig.check_empty()


def test_abort_during_encoding_keeps_the_rows_until_its_end() -> None:
    rig = Rig(num_rows=4)
    first = rig.add([[1], 3])
    rig.ask()
    rig.scheduler.abort(first.id)
    rig.lost.add(first.id)
    second = rig.add([[1], 8])
    rig.ask()
    assert rig.embeddings.num_free == 0
    rig.answer()
    rig.run()
    assert rig.said[second.id] == alone([[1], 8], 3)
    rig.check_empty()


@pytest.mark.parametrize(
    ("policy", "order"), [(Policy.FCFS, [1, 2, 3, 4, 6]), (Policy.PRIORITY, [4, 6, 1, 3, 2])]
)
def test_images_are_encoded_in_the_order_of_the_policy(policy: Policy, order: list[int]) -> None:
    rig = Rig(policy=policy)
    rig.add([[1], 1], priority=1)
    rig.add([[2], 2], priority=2)
    rig.add([[3], 3, 1], priority=1)
    rig.add([[4], 4, 6], priority=-1)
    rig.ask()
    assert rig.batches == [order]
    rig.answer()
    rig.run()
    rig.check_empty()


def test_room_for_embeddings_is_given_in_the_order_of_the_policy() -> None:
    rig = Rig(num_rows=4, policy=Policy.PRIORITY)
    rig.add([[1], 3])  # four rows
    rig.add([[2], 8], priority=2)
    rig.add([[3], 13], priority=1)
    rig.run()
    assert rig.batches == [[3], [13], [8]]
    rig.check_empty()


def test_sequence_waiting_for_an_image_counts_as_waiting() -> None:
    rig = Rig()
    for image in range(4):
        assert not rig.scheduler.is_full
        rig.add([[1], image])
        rig.step()  # up to the image, and then it gives its place up
        rig.step()
    assert rig.scheduler.is_full
    rig.run()
    assert not rig.scheduler.is_full
    rig.check_empty()


def test_embedding_rows_fit_memory_and_at_least_one_prompt() -> None:
    sizes = {"image_row_size": 16, "max_model_len": 100}
    assert num_area_rows(engine_config(**sizes, image_memory_bytes=64 * 1000 + 63)) == 1000
    assert num_area_rows(engine_config(**sizes, image_memory_bytes=64 * 10)) == 100


def test_a_batch_has_a_limit() -> None:
    rig = Rig()
    rig.add([[1], 3, [1], 1])
    rig.add([[1], 2])
    for max_numbers in (2, 0):
        rig.ask(max_numbers)
        rig.answer()
    assert rig.batches == [[3, 1], [2]]
    rig.run()
    rig.check_empty()


def test_images_that_come_during_a_batch_join_the_next_one() -> None:
    rig = Rig()
    rig.add([[1], 3])
    rig.ask()
    for image in (1, 2, 4):
        rig.add([[1], image])
    rig.answer()
    rig.ask()
    assert rig.batches == [[3], [1, 2, 4]]
    rig.answer()
    rig.run()
    rig.check_empty()


def test_batch_fatal_to_two_vision_workers_loses_one_image() -> None:
    rig = Rig()
    well, deadly, late = (rig.add([[1], image]) for image in (3, 1, 2))
    rig.ask()
    rig.die()
    rig.ask()
    rig.answer()
    rig.ask()
    (lost,) = rig.die().failed
    assert lost[0] is deadly
    rig.run()
    assert rig.batches == [[3, 1, 2], [3], [1], [2]]
    assert rig.finished == {well.id, late.id}
    rig.check_empty()


def test_rows_are_those_of_the_image_token_between_start_and_end() -> None:
    tokens = array("i", [IMAGE, 1, IMAGE, IMAGE, 2, IMAGE, IMAGE])
    placed = ImagePlaceholder.of(Image(b"", 2, 4, 3, {}), b"", tokens, IMAGE)
    assert placed.places.tolist() == [2, 3, 5]
    with pytest.raises(AssertionError, match="3 places for 4 rows"):
        ImagePlaceholder.of(Image(b"", 2, 4, 4, {}), b"", tokens, IMAGE)
