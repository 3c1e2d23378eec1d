"""The mock engine between its links: what it takes, computes, refuses and tells, and when."""

import math
import time
from array import array
from collections import deque
from pathlib import Path

import msgspec
import numpy as np
import pytest
from engine_configs import engine_config
from engine_rig import WAIT_MS, generate

from headrace.board.board import Board, Seat, Timing
from headrace.board.fields import EngineField
from headrace.config.config import ServerConfig
from headrace.engine_proc.mock.main import MockEngine, read_words
from headrace.engine_proc.mock.profile import Profile, read_profile, shipped_profiles
from headrace.engine_proc.mock.rows import Rows
from headrace.engine_proc.request_io import prefill_rate
from headrace.engine_proc.request_io.detokenizer_links import DetokenizerLinks
from headrace.engine_proc.request_io.turn import MAX_TURN_BYTES
from headrace.errors import ConfigError
from headrace.ipc.arena import Arena
from headrace.ipc.messages import (
    Abort,
    FinishReason,
    GenerateRequest,
    Image,
    Sampling,
    ScriptedTokens,
    StepOutput,
    StopSequence,
    Tensor,
    Times,
    ToEngine,
    request_id,
)
from headrace.ipc.sockets import Inbox, Outbox, address
from headrace.supervision.seats import seats_of

FIRST, SECOND = request_id(0, 1), request_id(0, 2)
WORDS = np.array([70, 71, 72], np.uint32)
NOTHING = Profile(step_ms=[(0, 0)], max_num_batched_tokens=16)


class Heard(DetokenizerLinks):
    """Links that keep what is sent to each of two detokenizers."""

    def __init__(self) -> None:
        self.told: list[deque[tuple[StepOutput, list[int]]]] = [deque(), deque()]

    def __len__(self) -> int:
        return len(self.told)

    def hold(self, detokenizer: int, output: StepOutput, tokens: bytes) -> None:
        self.told[detokenizer].append((output, array("I", tokens).tolist()))

    def send_ready(self) -> None:
        pass

    def flush(self) -> None:
        pass

    @property
    def are_holding(self) -> bool:
        return False


class Rig:
    """A mock engine and two detokenizers."""

    def __init__(
        self, profile: Profile = NOTHING, max_num_seqs: int = 2, arena: Arena | None = None
    ) -> None:
        config = engine_config(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=8,
            max_num_queued=3,
            engine="mock",
            embedding_size=3,
            arena_fd=arena and arena.fd,
            num_arena_regions=1,
        )
        self.board = Board.create([Seat("engine", 0)])
        self.slot = self.board.slot("engine")
        links = Heard()
        self.heard = links.told
        self.engine = MockEngine(config, profile, WORDS, links, self.slot)

    def add(self, id: int, num_prompt: int = 3, max_tokens: int = 2, **options: object) -> None:
        request = GenerateRequest(
            **{  # type: ignore[arg-type]
                "id": id,
                "detokenizer": 0,
                "max_tokens": max_tokens,
                "sampling": Sampling(),
                "stop_token_ids": [],
                "plan": b"plan %d" % id,
                **options,
            }
        )
        self.engine.take(request, bytes(4 * num_prompt))

    def step(self, detokenizer: int = 0) -> tuple[StepOutput, list[int]]:
        """Run a step; return what a detokenizer is told in it."""
        self.engine.step()
        return self.heard[detokenizer].popleft()

    def shown(self, *names: str) -> list[int]:
        return [self.slot[EngineField[name]] for name in names]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_text_says_words_until_max_tokens(rig: Rig) -> None:
    rig.add(FIRST, max_tokens=5)
    told = [rig.step() for _ in range(5)]
    assert told[0][0].started == {FIRST: b"plan %d" % FIRST}
    assert all(not output.started for output, _ in told[1:])
    assert [tokens for _, tokens in told] == [[70], [71], [72], [70], [71]]
    assert [end for o, _ in told for _, _, end in o.rows()] == [*[None] * 4, FinishReason.LENGTH]
    assert not rig.engine.has_work
    assert rig.shown("STEPS", "COMPUTED_TOKENS", "GENERATED_TOKENS", "FINISHED") == [5, 7, 5, 1]


def scripted(*ids: int, interval_ms: int = 0) -> ScriptedTokens:
    return ScriptedTokens(array("I", ids).tobytes(), interval_ms)


def test_a_scripted_text_says_its_tokens_and_stops(rig: Rig) -> None:
    rig.add(FIRST, max_tokens=5, script=scripted(7, 8, 9))
    rig.add(SECOND, max_tokens=5)
    told = [rig.step() for _ in range(3)]
    assert [tokens for _, tokens in told] == [[7, 70], [8, 71], [9, 72]]
    ends = [end for output, _ in told for id, _, end in output.rows() if id == FIRST]
    assert ends == [None, None, FinishReason.STOP]
    assert rig.shown("GENERATED_TOKENS", "FINISHED") == [6, 1]


def test_a_scripted_text_is_cut_at_max_tokens(rig: Rig) -> None:
    rig.add(FIRST, max_tokens=2, script=scripted(7, 8, 9))
    told = [rig.step() for _ in range(2)]
    assert [tokens for _, tokens in told] == [[7], [8]]
    assert [end for _, _, end in told[1][0].rows()] == [FinishReason.LENGTH]
    assert not rig.engine.has_work


def test_an_interval_holds_the_next_step_back(rig: Rig) -> None:
    rig.add(FIRST, script=scripted(7, 8, interval_ms=600_000))
    rig.step()
    assert not rig.engine.has_work
    assert 0 < rig.engine.pause_ms <= 600_000
    rig.engine.take(Abort(FIRST), b"")
    rig.add(SECOND)
    assert rig.engine.has_work


@pytest.mark.parametrize(
    ("allowed", "ends", "said"),
    [
        ([71, 200], [], [71, 71, 71, 71]),
        ([9, 200, 300], [9], [200, 300, 200, 300]),
        ([9], [9], [9, 9, 9, 9]),
    ],
    ids=["words", "other tokens", "only an end"],
)
def test_allowed_tokens_alone_are_said(
    rig: Rig, allowed: list[int], ends: list[int], said: list[int]
) -> None:
    mask = bytearray(64)
    for id in allowed:
        mask[id >> 3] |= 1 << (id & 7)
    rig.add(FIRST, max_tokens=4, allowed=bytes(mask), stop_token_ids=ends)
    rig.add(SECOND, max_tokens=6)
    told = [tokens for _, tokens in (rig.step() for _ in range(6))]
    assert [tokens[0] for tokens in told[:4]] == said
    assert [tokens[-1] for tokens in told] == [70, 71, 72, 70, 71, 72]


def test_images_are_released_when_computed_or_never_needed() -> None:
    arena = Arena.create(1, 1 << 20)
    region = arena.region(0)
    place = region.allocate(12)
    assert place is not None
    tensor = Tensor(place, region.generation(place), "f4", [3])
    rig = Rig(arena=arena, max_num_seqs=1)
    images = [Image(b"0" * 16, 1, 1, 1, {"pixel_values": tensor})]
    ids = [request_id(0, i) for i in range(1, 6)]
    for num, id in enumerate(ids, 1):
        region.send(place)
        rig.add(id, images=images)
        assert region.num_sent(place) == min(num, 3), "two more than may wait are refused"
    rig.step()
    assert region.num_sent(place) == 2
    rig.engine.take(Abort(ids[1]), b"")
    assert region.num_sent(place) == 1
    rig.step()
    rig.step()
    assert region.num_sent(place) == 0
    rig.engine.take(Abort(ids[4]), b"")
    region.send(place)
    rig.add(ids[4], images=images)
    assert region.num_sent(place) == 0, "an abort has overtaken it"


def test_sequences_are_counted_as_the_real_engine_counts_them(rig: Rig) -> None:
    rig.add(FIRST, max_tokens=5)
    rig.add(SECOND, max_tokens=9)
    for _ in range(6):
        rig.step()
    rig.engine.take(StopSequence(SECOND), b"")

    def spread(span: Timing) -> tuple[int, float]:
        histogram = rig.slot.histogram(span)
        return sum(histogram.counts), histogram.sum

    assert [rig.slot[EngineField.ENDED + why] for why in range(2)] == [1, 1]
    assert rig.shown("PREFILLED_TOKENS") == [6]
    assert spread(Timing.GENERATED) == (2, 5 + 6)
    assert spread(Timing.PROMPT) == (2, 6)
    assert spread(Timing.BETWEEN)[0] == 4 + 5
    assert spread(Timing.STEP) == (6, 6 + 2 * 4 + 1)
    assert all(spread(span)[0] == 2 for span in (Timing.WAITED, Timing.PREFILLED, Timing.PER_TOKEN))
    assert spread(Timing.DECODED)[1] == pytest.approx(spread(Timing.BETWEEN)[1])
    assert spread(Timing.RAN)[1] == pytest.approx(
        spread(Timing.PREFILLED)[1] + spread(Timing.DECODED)[1]
    )


def ids_of(output: StepOutput) -> list[int]:
    return [id for id, _, _ in output.rows()]


def test_each_text_begins_with_the_first_word(rig: Rig) -> None:
    rig.add(FIRST, max_tokens=3)
    rig.step()
    rig.add(SECOND, max_tokens=3)
    output, tokens = rig.step()
    assert dict(zip(ids_of(output), tokens, strict=True)) == {FIRST: 71, SECOND: 70}
    rig.step()
    output, tokens = rig.step()
    assert (ids_of(output), tokens) == ([SECOND], [72])


def test_prompts_are_computed_in_order_and_in_chunks(rig: Rig) -> None:
    rig.add(FIRST, num_prompt=20)
    rig.add(SECOND, num_prompt=4)
    rig.engine.step()  # 16 tokens of the first
    assert not rig.heard[0]
    assert rig.shown("RUNNING", "WAITING", "WAITING_TOKENS") == [0, 2, 8]
    assert ids_of(rig.step()[0]) == [FIRST, SECOND]
    assert rig.shown("RUNNING", "WAITING", "WAITING_TOKENS") == [2, 0, 0]
    assert rig.shown("COMPUTED_TOKENS", "GENERATED_TOKENS") == [24, 2]


def test_no_more_run_than_may(rig: Rig) -> None:
    for number in range(1, 4):
        rig.add(request_id(0, number))
    assert len(ids_of(rig.step()[0])) == 2
    assert rig.shown("RUNNING", "WAITING") == [2, 1]
    rig.step()
    assert ids_of(rig.step()[0]) == [request_id(0, 3)]


def test_a_request_beyond_the_queue_is_refused_whole(rig: Rig) -> None:
    for index in range(3):
        rig.add(FIRST + index)
    rig.add(SECOND)
    rig.add(SECOND + 1)
    output, _ = rig.heard[0].popleft()
    assert list(output.rows()) == [(SECOND, 0, FinishReason.REFUSED)]
    assert not rig.heard[0]
    assert rig.shown("QUEUE_REFUSALS", "WAITING") == [1, 0]  # shown with the next step
    rig.engine.step()
    assert rig.shown("RUNNING", "WAITING") == [2, 1]


def test_messages_beyond_a_turn_wait_for_the_next(rig: Rig, tmp_path: Path) -> None:
    where = address(str(tmp_path), "engine")
    inbox: Inbox[ToEngine] = Inbox(where, ToEngine)
    outbox = Outbox(where)
    outbox.send_all([(generate(FIRST + index), bytes(MAX_TURN_BYTES)) for index in range(3)])
    assert inbox.wait(WAIT_MS)
    waiting = []
    for _ in range(3):
        rig.engine.receive(inbox)
        waiting += rig.shown("WAITING")
    assert waiting == [1, 2, 3]
    outbox.close()
    inbox.close()


def test_an_abort_ends_all_sequences_and_is_reported_once(rig: Rig) -> None:
    for index in range(3):
        rig.add(FIRST + index)
    rig.step()
    rig.engine.take(Abort(FIRST), b"")
    output, _ = rig.heard[0].popleft()
    assert list(output.rows()) == [(FIRST, 0, FinishReason.ABORT)]
    assert not rig.engine.has_work
    rig.add(SECOND)
    assert ids_of(rig.step()[0]) == [SECOND]
    assert rig.shown("ABORTED", "RUNNING") == [3, 1]


def test_an_abort_that_overtakes_its_request_is_kept(rig: Rig) -> None:
    rig.engine.take(Abort(FIRST), b"")
    rig.add(FIRST)
    rig.add(FIRST + 1)
    assert not rig.engine.has_work


def test_a_stop_ends_one_sequence_in_silence(rig: Rig) -> None:
    rig.add(FIRST, max_tokens=9)
    rig.add(FIRST + 1, max_tokens=9)
    rig.step()
    rig.engine.take(StopSequence(FIRST), b"")
    output, tokens = rig.step()
    assert (ids_of(output), tokens) == ([FIRST + 1], [71])
    assert rig.shown("FINISHED", "RUNNING") == [1, 1]


def test_an_embedding_is_a_unit_vector(rig: Rig) -> None:
    rig.add(FIRST, embeds=True, detokenizer=1)
    output, tokens = rig.step(detokenizer=1)
    assert ([end for _, _, end in output.rows()], tokens) == ([FinishReason.STOP], [])
    vector = np.frombuffer(output.embeddings[FIRST], np.float32)
    assert len(vector) == 3
    assert math.isclose(np.linalg.norm(vector), 1, rel_tol=1e-6)
    assert not rig.engine.has_work


def test_outputs_carry_their_sequence_and_times(rig: Rig) -> None:
    rig.add(FIRST)
    rig.add(SECOND, detokenizer=1, times=Times(begun=1))
    rig.engine.step()
    (first, _), (second, _) = (heard.popleft() for heard in rig.heard)
    assert (ids_of(first), ids_of(second), first.times) == ([FIRST], [SECOND], {})
    times = second.times[SECOND]
    assert 1 == times.begun < times.queued <= times.scheduled <= times.first_token


def test_pages_are_those_of_the_tokens_there_are(rig: Rig) -> None:
    rig.add(FIRST, num_prompt=15)
    rig.step()
    assert rig.shown("PAGES_TOTAL", "PAGES_FREE") == [2 * 4, 2 * 4 - 1]
    rig.step()
    assert rig.shown("PAGES_FREE") == [8]


def test_steps_take_their_time() -> None:
    rig = Rig(Profile(step_ms=[(0, 5)]))
    rig.add(FIRST, max_tokens=10)
    begun = time.monotonic()
    for _ in range(10):
        rig.engine.step()
    assert time.monotonic() - begun >= 9 * 0.005  # the first may make up for time lost before


def test_the_rate_of_prompts_is_the_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_rate, "MIN_TOKENS", 1)
    rig = Rig(Profile(step_ms=[(0, 0), (10, 5)]))
    rig.add(FIRST, num_prompt=8)
    rig.engine.step()
    assert rig.shown("PREFILL_RATE") == [2000]
    rig.engine.step()
    assert rig.shown("PREFILL_RATE") == [2000], "a step without a prompt"


def test_rows_keep_their_places_when_others_leave() -> None:
    rows = Rows(3, WORDS)
    for id, step in ((10, 1), (20, 2), (30, 3)):
        rows.add(id, step)
    rows.remove(10)
    ids = array("Q", rows.ids)
    assert dict(zip(ids, array("I", rows.tokens(3)), strict=True)) == {20: 71, 30: 70}
    assert [ids[rows.place(id)] for id in (20, 30)] == [20, 30]


def test_a_step_s_time_is_a_sum() -> None:
    profile = Profile(step_ms=[(0, 1), (10, 1), (20, 3)], sequence_ms=0.5, context_token_ms=0.25)
    assert profile.seconds(5, 0, 0) == 1e-3
    assert profile.seconds(15, 2, 4) == pytest.approx(2e-3 + 1e-3 + 1e-3)
    assert profile.seconds(40, 0, 0) == pytest.approx(7e-3)


def test_every_shipped_profile_can_be_read() -> None:
    assert set(shipped_profiles()) == {"zero", "2ms", "h200-8b", "encoder"}
    for name in shipped_profiles():
        assert read_profile(name).description
    assert read_profile("2ms").seconds(1000, 100, 10000) == 2e-3


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"step_ms": []}', "length >= 1"),
        ('{"step_ms": [[0, -1]]}', ">= 0"),
        ('{"step_ms": [[5, 1], [5, 2]]}', "must go up in tokens"),
        ('{"step_ms": [[0, 1]], "speed": 1}', "unknown field `speed`"),
        ("{", "truncated"),
    ],
)
def test_a_profile_that_is_none_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why) as error:
        read_profile(str(path))
    assert str(path) in str(error.value)


def test_an_unknown_profile_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"one of 2ms, encoder, h200-8b, zero"):
        read_profile("h200")


@pytest.mark.parametrize(
    ("vocab", "words"),
    [
        ({"a": 0, "Ġthe": 2, "Ġof": 1, "Ġfox": 5, "Ġ1": 4}, [2, 5]),
        ([["<unk>", 0.0], ["▁the", -1.5], ["▁", -2.0]], [1]),
        ({"a": 7, "b": 3}, [3]),
    ],
)
def test_words_are_found_in_any_vocabulary(tmp_path: Path, vocab: object, words: list[int]) -> None:
    tokenizer = msgspec.json.encode({"model": {"type": "any", "vocab": vocab}})
    (tmp_path / "tokenizer.json").write_bytes(tokenizer)
    assert read_words(tmp_path).tolist() == words


def test_the_mock_engine_has_no_worker() -> None:
    assert "worker" not in {seat.role for seat in seats_of(ServerConfig(engine="mock"))}
