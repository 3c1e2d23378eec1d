"""Constraints made into grammars by a process that may fail (`grammar_checker.py`), and kept.

That process is started when the first constraint comes, and again after one that was too much for
it. A thread talks to it; requests that wait for it are laid aside (`stages.Check`).
"""

import hashlib
import logging
import os
import queue
import signal
import subprocess
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from headrace.config.process_configs import ModelCard
from headrace.errors import InvalidValue, Unsupported
from headrace.logs import current_request
from headrace.tokenizer_proc.grammar.grammar_checker import CPU_S, Task, Verdict
from headrace.tokenizer_proc.jobs.child_pipe import ChildPipe
from headrace.tokenizer_proc.jobs.stages import Check, Encoding
from headrace.tokenizer_proc.requests.constraints import Constraint

MODULE = "headrace.tokenizer_proc.grammar.grammar_checker"
DEADLINE_S = 60.0  # for a verdict, with all that is loaded before the first
MAX_KEPT = 128  # verdicts; the one that was asked for longest ago goes first
TRY_AGAIN = Verdict(error="could not be compiled; try again", may_change=True)

log = logging.getLogger(__name__)


class Grammars:
    """Known grammars of one model.

    Args:
        follows: whether the engine can; a mock cannot.
        is_scripted: whether texts are scripted now, whatever grammar a request has.
    """

    def __init__(
        self,
        card: ModelCard,
        follows: bool = True,
        is_scripted: Callable[[], bool] | None = None,
    ) -> None:
        self._card = card
        self._follows = follows
        self._is_scripted = is_scripted
        self._kept: OrderedDict[bytes, Check[Verdict]] = OrderedDict()
        self._wanted: queue.SimpleQueue[tuple[Constraint, Check[Verdict], str]] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._title = f"headrace: grammars of {os.getpid()}"
        task = Task(card.tokenizer_path, card.vocab_size, card.eos_token_ids, self._title)
        # The CPU limit does not end a checker that hangs.
        self._checker = ChildPipe(MODULE, task, DEADLINE_S, stderr=subprocess.DEVNULL)

    def compiled(self, param: str, constraint: Constraint) -> Encoding[bytes]:
        """Return the grammar that a constraint, of the field `param`, comes to.

        Raises:
            InvalidValue: it is wrong, or takes too much.
            Unsupported: this server follows no grammars.
        """
        if self._is_scripted is not None and self._is_scripted():
            return b""
        if not self._follows:
            raise Unsupported(f"{param}: --engine mock follows no grammar", param)
        if not self._card.eos_token_ids:
            raise Unsupported(f"{param}: this model has no token that ends a text", param)
        check = self._check(constraint)
        if check.found is None:
            yield check
        verdict = check.found
        assert verdict is not None
        if not verdict.is_supported:
            raise Unsupported(
                f"{param}: this model's tokenizer allows no grammar: {verdict.error}", param
            )
        if verdict.error:
            raise InvalidValue(f"{param}: {verdict.error}", param)
        return verdict.grammar

    def _check(self, constraint: Constraint) -> Check[Verdict]:
        key = hashlib.blake2b(msgspec.msgpack.encode(constraint), digest_size=16).digest()
        check = self._kept.get(key)
        if check is None or (check.found is not None and check.found.may_change):
            check = self._kept[key] = Check()
            self._wanted.put((constraint, check, current_request().id))
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            if self._thread is None:
                self._thread = threading.Thread(target=self._ask_all, name="grammars", daemon=True)
                self._thread.start()
        self._kept.move_to_end(key)
        return check

    def _ask_all(self) -> None:
        """Have constraints checked, one after another, as long as this process lives."""
        while True:
            constraint, check, request_id = self._wanted.get()
            current_request().id = request_id
            try:
                check.found = self._ask(constraint)
            except OSError as error:  # the system is short of processes, say
                log.warning("%s cannot be started: %s", self._title, error)
                check.found = TRY_AGAIN

    def _ask(self, constraint: Constraint) -> Verdict:
        began_at = time.monotonic()
        verdict = self._checker.ask(constraint, Verdict)
        if verdict is not None:
            if verdict.detail:
                log.info("a %s is refused: %s", constraint.kind, verdict.detail)
            return verdict
        code = self._checker.end()
        if time.monotonic() - began_at >= self._checker.deadline_s:
            log.warning("%s hung; it has been ended", self._title)
            return TRY_AGAIN
        log.warning("a %s was too much to compile: exit code %s", constraint.kind, code)
        if code == -signal.SIGPROF:
            return Verdict(error=f"takes more than {CPU_S:g} s of CPU time to compile")
        return Verdict(error="takes too much memory to compile")
