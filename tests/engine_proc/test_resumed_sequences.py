"""A sequence that is sent again goes on, under whichever of its ids there are tokens."""

from array import array
from pathlib import Path

from engine_rig import FIRST, Rig

from headrace.ipc.messages import GeneratedTokens, GenerateRequest, Sampling, request_id


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
