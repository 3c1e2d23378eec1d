"""The engine and images: which sequences wait, what is released, and what a failure ends."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_rig import FIRST, IMAGE_TOKEN, Rig, Sevens, generate

from headrace.board.fields import EngineField
from headrace.ipc.messages import (
    Abort,
    FinishReason,
    GenerateRequest,
    Image,
    Sampling,
    Tensor,
    request_id,
)
from headrace.ipc.worker_messages import Encoded


@pytest.fixture
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(tmp_path, **getattr(request, "param", {}))
    yield made
    made.close()


PICTURE = (1, 2, IMAGE_TOKEN, IMAGE_TOKEN, 3)  # a prompt


def show(rig: Rig, counter: int, place: int, **options: object) -> int:
    """Send a request with an image at a place of the arena; return its id."""
    id = request_id(0, counter)
    image = Image(b"%d" % place, 2, 2, 2, {"pixels": Tensor(place, 1, "f4", [1])})
    sampling = Sampling()
    request = GenerateRequest(id, 0, 2, sampling, [], b"plan", images=[image], **options)  # type: ignore[arg-type]
    rig.take(request, prompt=PICTURE)
    return id


def test_an_image_is_encoded_and_the_text_goes_on_behind_it(rig: Rig) -> None:
    show(rig, 1, 4096)
    rig.engine.poll_images()
    assert len(rig.eyes.asked) == 1
    assert rig.step() == ["start", "finish"]  # what is before the image
    assert rig.step() == []
    assert not rig.released
    rig.eyes.answer = Encoded()
    rig.engine.poll_images()
    assert rig.released == [4096]
    rig.step()
    rig.step()
    assert [rig.heard()[1] for _ in range(2)] == [[7], [7]]
    assert rig.slot[EngineField.WAITING_IMAGES] == 0
    assert rig.slot[EngineField.EMBEDDING_ROWS] == rig.slot[EngineField.EMBEDDING_ROWS_FREE] == 32


def test_an_image_that_cannot_be_encoded_is_its_requests_end(rig: Rig) -> None:
    id = show(rig, 1, 4096)
    rig.engine.poll_images()
    rig.eyes.answer = Encoded(failed={0: "bad"})
    rig.engine.poll_images()
    rig.links.flush()
    output, _ = rig.heard()
    assert list(output.rows()) == [(id, 0, FinishReason.ABORT)]
    assert output.failed == {id: b"plan"}
    assert rig.released == [4096]
    assert not rig.scheduler.requests


def test_a_request_whose_pixels_are_gone_is_let_go_of(rig: Rig) -> None:
    id = show(rig, 1, 4096)
    rig.engine.poll_images()
    rig.eyes.answer = Encoded(gone=[0])
    rig.engine.poll_images()
    rig.links.flush()
    assert list(rig.heard()[0].rows()) == [(id, 0, FinishReason.ABORT)]
    assert not rig.scheduler.requests


@pytest.mark.parametrize("rig", [{"max_num_queued": 1}], indirect=True)
def test_pixels_of_a_rejected_request_are_released(rig: Rig) -> None:
    show(rig, 1, 4096)
    late = show(rig, 2, 8192)
    assert rig.released == [8192]
    assert list(rig.heard()[0].rows()) == [(late, 0, FinishReason.REFUSED)]
    rig.take(Abort(request_id(0, 3)))
    show(rig, 3, 12288)
    assert rig.released == [8192, 12288]
    rig.take(Abort(FIRST))
    assert rig.released == [8192, 12288, 4096]


def test_pixels_of_an_aborted_grammar_waiter_are_released(rig: Rig) -> None:
    id = show(rig, 1, 4096, grammar=b"a")
    assert not rig.scheduler.requests
    rig.take(Abort(id))
    rig.compiler.let.set()
    assert rig.released == [4096]


def test_resent_request_reuses_its_encoded_image(rig: Rig) -> None:
    id = show(rig, 1, 4096)
    rig.engine.poll_images()
    rig.eyes.answer = Encoded()
    rig.engine.poll_images()
    rig.step()
    show(rig, 2, 4096, resumes=id)
    rig.step()
    assert len(rig.eyes.asked) == 1
    assert rig.released == [4096, 4096]


def test_suspect_waiting_for_an_image_delays_no_other(rig: Rig) -> None:
    before, dying, well = tuple(range(16)), Sevens(lives=0), Sevens()
    for counter in (1, 2):
        image = Image(b"%d" % counter, 16, 2, 2, {"pixels": Tensor(4096 * counter, 1, "f4", [1])})
        id = request_id(0, counter)
        request = GenerateRequest(id, 0, 2, Sampling(), [], b"plan", images=[image])
        rig.take(request, prompt=(*before, IMAGE_TOKEN, IMAGE_TOKEN, 1))
    rig.engine.run_once(dying)  # type: ignore[arg-type]
    assert dying.events == ["start", "worker 0 died"]
    text = request_id(0, 3)
    rig.take(generate(text))
    for _ in range(5):  # first that step's sequences, one by one up to the image, then the others
        rig.engine.run_once(well)  # type: ignore[arg-type]
    rig.links.flush()
    assert rig.heard()[0].started.keys() == {text}
