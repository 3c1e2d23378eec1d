"""Rules choose answers, in order; requests are remembered; a death loses neither."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.ipc.messages import HttpRequest, share_key
from headrace.testing.script import MockReply, Script, ScriptedAnswer, ScriptRule, script_of
from headrace.tokenizer_proc.scripts.script_store import NoScriptedResponse, ScriptStore

ONE, TWO = MockReply("one"), MockReply("two")


def http(id: int, **fields: Any) -> HttpRequest:
    return HttpRequest(id, "POST", "/v1/chat/completions", 7.0, **fields)


@pytest.fixture
def store(tmp_path: Path) -> ScriptStore:
    return ScriptStore(str(tmp_path))


def put(store: ScriptStore, *items: ScriptedAnswer | ScriptRule, repeat: bool = False) -> None:
    store.put(script_of(items, repeat))


def test_store_is_closed_until_something_is_asked(store: ScriptStore) -> None:
    assert not store.is_open
    assert not store.has_rules
    store.open()
    assert store.is_open
    assert not store.has_rules


def test_answers_come_in_order_and_then_none(store: ScriptStore) -> None:
    put(store, ONE, TWO)
    assert [store.take(http(id), None, "") for id in (1, 2)] == [ONE, TWO]
    assert store.num_left() == [0]
    with pytest.raises(NoScriptedResponse, match="whose last message is 'Hi'"):
        store.take(http(3), None, "Hi")


def test_repeated_answers_begin_anew(store: ScriptStore) -> None:
    put(store, ONE, TWO, repeat=True)
    assert [store.take(http(id), None, "") for id in range(4)] == [ONE, TWO, ONE, TWO]


@pytest.mark.parametrize(
    ("rule", "asked"),
    [
        ({"model": "m"}, (http(1), "m", "")),
        ({"contains": "rain"}, (http(1), None, "Will it rain?")),
        ({"pattern": r"\brain\W"}, (http(1), None, "Will it rain?")),
        ({"api_key": "k"}, (http(1, key=share_key(b"k")), None, "")),
    ],
    ids=["model", "contains", "pattern", "api_key"],
)
def test_rule_matches_what_it_names(store: ScriptStore, rule: Any, asked: Any) -> None:
    put(store, ScriptRule([ONE], **rule, repeat=True), ScriptRule([TWO], repeat=True))
    assert store.take(*asked) == ONE
    assert store.take(http(2), "other", "sun") == TWO


def test_request_sent_again_gets_the_same_answer(store: ScriptStore) -> None:
    put(store, ONE, TWO)
    assert store.take(http(1), None, "") == ONE
    assert store.take(http(9, origin=1), None, "") == ONE
    assert store.take(http(2), None, "") == TWO


def test_answer_of_a_refused_request_is_used_next(store: ScriptStore) -> None:
    put(store, ONE, TWO)
    store.take(http(1), None, "")
    store.give_back(http(1))
    assert store.take(http(2), None, "") == ONE


def test_another_process_sees_what_one_has_taken(store: ScriptStore, tmp_path: Path) -> None:
    put(store, ONE, TWO)
    store.take(http(1), None, "")
    assert ScriptStore(str(tmp_path)).take(http(2), None, "") == TWO


def test_requests_are_recorded_once_and_forgotten(store: ScriptStore) -> None:
    assert store.recorded() == b"[]"
    store.record(http(1), {"prompt": "a\nb"})
    store.record(http(2, origin=1), {"prompt": "a\nb"})
    (told,) = json.loads(store.recorded())
    body = {"prompt": "a\nb"}
    assert told == {"path": "/v1/chat/completions", "received_at": 7.0, "body": body}
    store.forget()
    assert store.recorded() == b"[]"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ('{"rules": [{"answers": []}]}', "a rule has no answers"),
        ('{"rules": [{"answers": [{"type": "reply"}], "pattern": "("}]}', "no regular expression"),
        ('{"rules": [{"answers": [{"type": "malformed", "kind": "torn"}]}]}', "Invalid enum"),
        ('{"rules": [{"answers": [{"type": "reply", "texd": "x"}]}]}', "unknown field `texd`"),
        ('{"rules": [{"answers": [{"type": "error", "status": 200}]}]}', ">= 400"),
    ],
)
def test_wrong_script_is_refused_with_the_reason(script: str, why: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=why):
        msgspec.json.decode(script, type=Script)
