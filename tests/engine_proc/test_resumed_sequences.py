"""A sequence that is sent again goes on, under whichever of its ids there are tokens."""

from array import array
from pathlib import Path

import pytest
from engine_rig import FIRST, IMAGE_TOKEN, Rig

from headrace.engine_proc.scheduling.step_time_model import StepTimeModel
from headrace.ipc.messages import (
    GeneratedTokens,
    GenerateRequest,
    Image,
    Sampling,
    Tensor,
    request_id,
)


def test_what_was_sent_again_in_vain_is_taken_up_later(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    said = GeneratedTokens(array("Q", [FIRST]).tobytes(), array("I", [2]).tobytes())
    rig.engine._take(said, array("I", [7, 8]).tobytes())
    lost, again, gone, last = (request_id(0, counter) for counter in range(2, 6))
    rig.take(
        GenerateRequest(again, 0, 4, Sampling(), [], b"", resumes=lost, earlier=[FIRST]),
        GenerateRequest(last, 0, 4, Sampling(), [], b"", resumes=gone, earlier=[again, lost]),
    )
    (sequence,) = rig.scheduler.waiting
    assert (sequence.id, sequence.generated.tolist()) == (last, [7, 8])
    rig.close()


def test_the_most_tokens_of_all_ids_are_taken_up(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    said = GeneratedTokens(array("Q", [FIRST]).tobytes(), array("I", [2]).tobytes())
    rig.engine._take(said, array("I", [7, 8]).tobytes())
    lost, again, last = (request_id(0, counter) for counter in range(2, 5))
    rig.take(
        GenerateRequest(again, 0, 4, Sampling(), [], b"", resumes=lost),
        GenerateRequest(last, 0, 4, Sampling(), [], b"", resumes=again, earlier=[lost, FIRST]),
    )
    (sequence,) = rig.scheduler.waiting
    assert (sequence.id, sequence.generated.tolist()) == (last, [7, 8])
    rig.close()


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_tokens_that_come_late_are_not_generated_again(tmp_path: Path, num_steps: int) -> None:
    rig = Rig(tmp_path)
    again = request_id(0, 2)
    rig.take(GenerateRequest(again, 0, 6, Sampling(), [], b"plan", resumes=FIRST))
    for _ in range(num_steps):
        rig.step()
    said = GeneratedTokens(array("Q", [FIRST]).tobytes(), array("I", [3]).tobytes())
    rig.engine._take(said, array("I", [7, 7, 7]).tobytes())
    while rig.scheduler.has_work:
        rig.step()
    heard = [rig.heard() for _ in range(num_steps + 1 + 3)]
    assert [tokens for _, tokens in heard] == [[7]] * num_steps + [[7] * (3 - num_steps)] + [
        [7]
    ] * 3
    assert [output.started for output, _ in heard] == [{again: b"plan"}] + [{}] * (num_steps + 3)
    rig.close()


def test_log_probabilities_do_not_go_on_after_late_tokens(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    again = request_id(0, 2)
    rig.take(GenerateRequest(again, 0, 4, Sampling(logprobs=0), [], b"", resumes=FIRST))
    (sequence,) = rig.scheduler.waiting
    said = GeneratedTokens(array("Q", [FIRST]).tobytes(), array("I", [1]).tobytes())
    rig.engine._take(said, array("I", [7]).tobytes())
    assert list(rig.scheduler.waiting) == [sequence]
    assert not sequence.generated
    rig.close()


def say(rig: Rig, *tokens: int) -> None:
    """Have a detokenizer tell the tokens of a dead engine's sequence."""
    said = GeneratedTokens(array("Q", [FIRST]).tobytes(), array("I", [len(tokens)]).tobytes())
    rig.engine._take(said, array("I", tokens).tobytes())


def test_late_tokens_keep_the_turn_of_their_sequence(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    again, other = (request_id(0, counter) for counter in range(2, 4))
    rig.take(
        GenerateRequest(again, 0, 6, Sampling(), [], b"", resumes=FIRST),
        GenerateRequest(other, 0, 6, Sampling(), [], b""),
    )
    say(rig, 7, 7)
    first, second = rig.scheduler.waiting
    assert (first.id, first.generated.tolist()) == (again, [7, 7])
    assert (second.id, first.turn < second.turn) == (other, True)
    rig.close()


@pytest.mark.parametrize("tokens", [(7,), (7, 7), (8, 7, 7)])
def test_late_tokens_that_add_nothing_change_nothing(
    tmp_path: Path, tokens: tuple[int, ...]
) -> None:
    rig = Rig(tmp_path)
    again = request_id(0, 2)
    rig.take(GenerateRequest(again, 0, 6, Sampling(), [], b"", resumes=FIRST))
    rig.step()
    rig.step()
    (sequence,) = rig.scheduler.running
    say(rig, *tokens)
    assert rig.scheduler.running == [sequence]
    assert sequence.generated.tolist() == [7, 7]
    rig.close()


def test_late_tokens_reach_a_sequence_whose_grammar_is_compiled(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    again = request_id(0, 2)
    rig.take(GenerateRequest(again, 0, 6, Sampling(), [], b"", resumes=FIRST, grammar=b"g"))
    say(rig, 7, 7)
    sequence = rig.engine._grammars.find(again)
    assert sequence is not None
    assert sequence.generated.tolist() == [7, 7]
    rig.links.flush()
    assert rig.heard()[1] == [7, 7]
    rig.compiler.let.set()
    rig.close()


def test_a_sequence_with_images_begins_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    again = request_id(0, 2)
    image = Image(b"1", 0, 1, 1, {"pixels": Tensor(0, 1, "f4", [1])})
    asked = GenerateRequest(again, 0, 6, Sampling(), [], b"", resumes=FIRST, images=[image])
    rig.take(asked, prompt=(IMAGE_TOKEN, 2))
    (sequence,) = rig.scheduler.waiting
    say(rig, 7, 7)
    assert list(rig.scheduler.waiting) == [sequence]
    assert not rig.released
    rig.close()


class EvenSteps(StepTimeModel):
    """Steps that take 10 ms a token."""

    def tokens_within(self, seconds: float, limit: int) -> int:
        return min(limit, int(seconds * 100))


def test_interrupted_streams_have_longer_steps_until_they_go_on(tmp_path: Path) -> None:
    rig = Rig(tmp_path, target_itl_ms=100)
    rig.engine._step_time = EvenSteps()
    first, again, another = (request_id(0, counter) for counter in range(2, 5))
    rig.take(GenerateRequest(first, 0, 100, Sampling(), [], b""))
    rig.step()
    assert rig.engine._budget() == 1 + 10
    said = GeneratedTokens(array("Q", [FIRST]).tobytes(), array("I", [30]).tobytes())
    rig.engine._take(said, array("I", [7] * 30).tobytes())
    rig.take(GenerateRequest(again, 0, 100, Sampling(), [], b"", resumes=FIRST))
    assert rig.engine._budget() == 1 + 50
    rig.step()
    assert rig.engine._budget() == 2 + 10
    rig.take(GenerateRequest(another, 0, 100, Sampling(), [], b"", resumes=request_id(0, 9)))
    assert rig.engine._budget() == 2 + 10, "nothing of it is known"
    rig.close()
