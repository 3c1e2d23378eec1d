"""Compiles the grammars of new sequences in a thread, beside the steps.

llguidance and its table of the vocabulary take half a second of processor time. They are loaded
once the engine has been idle for 2 s, so no start and no stream waits for them. A grammar that
comes before loads them at once, and running streams pause twice. With 49,000 tokens, calm on a
Xeon, the tokenizer of the library `tokenizers` holds the GIL for 112 ms, `LLTokenizer` for 145 to
220 ms. Its trie alone takes 100 ms. With 250,000 tokens these may be seconds, in which no thread of
the process answers the server of another machine. So an engine that listens loads before it serves.
Compilation does not hold the GIL. A sequence is scheduled once its grammar is compiled, so it
delays no other. Sequences with equal grammars share the compiled one.
"""

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.engine_proc.sequence.grammar_matcher import GrammarMatcher
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.errors import ModelError
from headrace.ipc.messages import request_of
from headrace.system.malloc import give_back

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from headrace.model.grammar_compiler import GrammarCompiler

BEAT_S = 1.0
MAX_KEPT = 64  # compiled grammars; the one that was used longest ago goes first

log = logging.getLogger(__name__)


class MatcherQueue:
    """The sequences that wait for their grammar matchers, and a cache of compiled grammars.

    Args:
        load: makes a compiler, in the thread that uses it.
        ends: EOS ids.
    """

    def __init__(self, load: "Callable[[], GrammarCompiler]", ends: list[int]) -> None:
        self._load = load
        self._ends = frozenset(ends)
        self._kept: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._waiting: dict[bytes, list[Sequence]] = {}  # by grammar
        self._wanted: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[tuple[bytes, LLMatcher | None]] = queue.SimpleQueue()
        self._has_begun = False
        self._has_loaded = threading.Event()

    def begin(self) -> None:
        """Load what compiles, in a thread of its own, unless that has begun."""
        if not self._has_begun:
            self._has_begun = True
            threading.Thread(target=self._compile_all, name="grammars", daemon=True).start()

    def wait_loaded(self, beat: Callable[[], None]) -> None:
        """Wait until a load that has begun is over, with heartbeats."""
        while self._has_begun and not self._has_loaded.wait(BEAT_S):
            beat()

    @property
    def is_busy(self) -> bool:
        """Whether a sequence waits for its matcher."""
        return bool(self._waiting)

    @property
    def requests(self) -> set[int]:
        """The ids of all requests that have sequences here."""
        return {request_of(s.id) for waiting in self._waiting.values() for s in waiting}

    def prepare(self, sequence: Sequence) -> bool:
        """Give a sequence its matcher; return False where it comes later, from `ready`."""
        grammar = sequence.request.grammar
        if grammar in self._kept:
            self._kept.move_to_end(grammar)
            sequence.matcher = GrammarMatcher(self._kept[grammar].deep_copy(), self._ends)
            return True
        self.begin()
        if grammar not in self._waiting:
            self._wanted.put(grammar)
        self._waiting.setdefault(grammar, []).append(sequence)
        return False

    def ready(self) -> list[Sequence]:
        """Return the sequences whose grammars have been compiled since the last time.

        A grammar that cannot be compiled leaves them without a matcher, which ends them.
        """
        found = []
        while not self._made.empty():
            grammar, compiled = self._made.get()
            for sequence in self._waiting.pop(grammar):
                if compiled is not None:
                    sequence.matcher = GrammarMatcher(compiled.deep_copy(), self._ends)
                found.append(sequence)
            if compiled is not None:
                self._kept[grammar] = compiled
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return found

    def find(self, id: int) -> Sequence | None:
        """Return a sequence that waits here."""
        waiting = (sequence for each in self._waiting.values() for sequence in each)
        return next((sequence for sequence in waiting if sequence.id == id), None)

    def abort(self, request: int) -> list[Sequence]:
        """Let go of the sequences of a request; return those there were."""
        gone = []
        for waiting in self._waiting.values():
            gone += [s for s in waiting if request_of(s.id) == request]
            waiting[:] = [s for s in waiting if request_of(s.id) != request]
        return gone

    def _compile_all(self) -> None:
        """Compile grammars as long as the process lives."""
        compiler = self._load_compiler()
        self._has_loaded.set()
        while True:
            grammar = self._wanted.get()
            compiler = compiler or self._load_compiler()
            compiled = None
            try:
                compiled = compiler.compile(grammar.decode()) if compiler else None
            except ValueError as error:
                log.error("a grammar that was checked cannot be followed: %s", error)
            self._made.put((grammar, compiled))

    def _load_compiler(self) -> "GrammarCompiler | None":
        """Return what compiles; None if the model's files are gone or have no such tokenizer."""
        try:
            compiler = self._load()
        except ValueError as error:
            log.info("no grammar can be followed: %s", error)
            return None
        except (OSError, ModelError) as error:
            log.warning("no grammar can be followed until the model can be read: %s", error)
            return None
        give_back()  # what the tables were made of
        return compiler
