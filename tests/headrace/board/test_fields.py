"""Every role has words of its own, and a gauge cannot survive a restart."""

from itertools import pairwise

import pytest

from headrace.board.admin_requests import WISHES
from headrace.board.board import HISTOGRAMS, LAST_WORDS, SLOT_WORDS, Seat, Slot, State
from headrace.board.fields import (
    COUNTER,
    FIELD_WORDS,
    FIELDS,
    GAUGE,
    MAX_PREPROCESSORS,
    MAX_TOKENIZERS,
    TIMER_GAUGE,
    BoardField,
    CommonField,
    DetokenizerField,
    EngineField,
    FrontendField,
)
from headrace.ipc.messages import FinishReason
from headrace.metrics.headrace_metrics import COUNTERS, GAUGES
from headrace.metrics.tool_calls import labeled
from headrace.metrics.vllm import MAX_DRAFTS
from headrace.runtime.roles import ROLES

WRITTEN_AT_START = (CommonField.PID, CommonField.STATE, CommonField.HEARTBEAT_NS)


def fields_of(role: str) -> list[BoardField]:
    return [*CommonField, *FIELDS[role]]


def make_slot(role: str) -> Slot:
    return Slot(memoryview(bytearray(SLOT_WORDS * 8)).cast("Q"), Seat(role, 0))


def test_fields_cover_every_role() -> None:
    assert FIELDS.keys() == ROLES.keys()


@pytest.mark.parametrize("role", FIELDS)
def test_fields_of_a_role_do_not_overlap(role: str) -> None:
    fields = fields_of(role)
    for before, after in pairwise(fields):
        assert before.num_words >= 1
        assert before + before.num_words == after, f"{before!r}, {after!r}"
    num_names = sum(len(kind.__members__) for kind in (CommonField, FIELDS[role]))
    assert num_names == len(fields), "a name is an alias"


@pytest.mark.parametrize("role", FIELDS)
def test_fields_fit_below_text_and_histograms(role: str) -> None:
    assert max(field.words.stop for field in fields_of(role)) <= FIELD_WORDS <= LAST_WORDS
    assert LAST_WORDS < HISTOGRAMS


def test_fields_beyond_the_limit_are_refused() -> None:
    last = CommonField.DEATHS.words.stop + FIELD_WORDS - 1
    with pytest.raises(ValueError, match=f"Wide needs word {last} of {FIELD_WORDS}"):

        class Wide(BoardField):
            ALL = COUNTER, FIELD_WORDS


@pytest.mark.parametrize("role", FIELDS)
def test_starting_resets_gauges_and_nothing_else(role: str) -> None:
    slot = make_slot(role)
    for word in range(FIELD_WORDS):
        slot[word] = 7
    slot.enter(State.STARTING)
    for field in fields_of(role):
        if field in WRITTEN_AT_START:
            continue
        expected = 0 if field.kind in (GAUGE, TIMER_GAUGE) else 7 + (field is CommonField.STARTS)
        assert {slot[word] for word in field.words} == {expected}, repr(field)


@pytest.mark.parametrize("role", FIELDS)
def test_work_is_every_own_field_but_timers(role: str) -> None:
    slot = make_slot(role)
    for field in fields_of(role):
        for word in field.words:
            before = slot.work
            slot.add(word)
            is_work = not isinstance(field, CommonField) and field.kind != TIMER_GAUGE
            assert (slot.work != before) == is_work, repr(field)


def test_fields_of_several_words_have_one_per_meaning() -> None:
    assert FrontendField.WISHES.num_words == len(WISHES)
    num_tokenizers = MAX_TOKENIZERS + 1 + MAX_PREPROCESSORS + 1
    assert FrontendField.FORWARDED_BYTES.num_words == num_tokenizers
    assert EngineField.ENDED.num_words == FinishReason.LENGTH + 1
    assert EngineField.RIGHT_AT.num_words == MAX_DRAFTS
    assert DetokenizerField.TOOL_READINGS.num_words == len(list(labeled()))


def test_field_names_the_role_that_has_it() -> None:
    for role, fields in FIELDS.items():
        assert {field.role for field in fields} == {role}


def test_metrics_show_fields_of_their_own_kind() -> None:
    assert {field.kind for *_, field in COUNTERS} == {COUNTER}
    assert {field.kind for *_, field in GAUGES} == {GAUGE}
