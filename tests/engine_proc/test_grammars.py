"""When what compiles grammars is loaded."""

import queue
import threading
from pathlib import Path
from typing import Any

import pytest
from engine_rig import FIRST, WAIT_MS, Rig, generate

from headrace.engine_proc import grammars
from headrace.engine_proc.engine_core import QUIET_S
from headrace.engine_proc.grammars import MatcherQueue
from headrace.errors import ModelError
from headrace.model.grammar_compiler import GrammarCompiler


def test_the_compiler_is_loaded_when_the_engine_is_idle(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    loaded: queue.SimpleQueue[None] = queue.SimpleQueue()

    def load() -> GrammarCompiler:
        loaded.put(None)
        raise ValueError("not of interest")

    rig.engine._grammars = MatcherQueue(load, [0])
    rig.take(generate(FIRST))
    while rig.scheduler.has_work:
        assert loaded.empty(), "a sequence is running"
        rig.step()
    rig.engine.receive(rig.inbox)
    assert loaded.empty(), "the next request may come at once"
    rig.now += QUIET_S
    rig.engine.receive(rig.inbox)
    loaded.get(timeout=WAIT_MS / 1000)
    rig.engine.receive(rig.inbox)
    assert loaded.empty(), "it is loaded once"
    rig.close()


def test_a_compiler_is_loaded_before_an_engine_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "BEAT_S", 0.001)
    may_load, beats = threading.Event(), list[int]()

    def load() -> Any:
        assert may_load.wait(WAIT_MS / 1000)
        return FakeCompiler()

    def beat() -> None:
        beats.append(1)
        may_load.set()

    matchers = MatcherQueue(load, [0])
    matchers.wait_loaded(beat)
    assert not beats, "nothing loads"
    matchers.begin()
    matchers.wait_loaded(beat)
    assert may_load.is_set(), "it waited, with a heartbeat"


class FakeCompiler:
    """Compiles each grammar to itself."""

    def compile(self, grammar: str) -> str:
        return grammar


def test_a_compiler_is_loaded_anew_once_files_are_back() -> None:
    outcomes = [FileNotFoundError("model.gguf"), ModelError("model.gguf: truncated")]

    def load() -> Any:
        if outcomes:
            raise outcomes.pop(0)
        return FakeCompiler()

    matchers = MatcherQueue(load, [0])
    matchers.begin()
    made = []
    for grammar in (b"first", b"second"):
        matchers._wanted.put(grammar)
        made.append(matchers._made.get(timeout=WAIT_MS / 1000))
    assert made == [(b"first", None), (b"second", "second")]
