"""The script of a server and the requests it has had, in files that all tokenizers share.

They are in the run directory, and exist once something at `/mock` has been asked for. A lock makes
each change whole; a tokenizer that takes the seat of a dead one finds what its predecessor left.
The lock's one byte says whether they exist. Every tokenizer has it in its memory: each request of a
server without a script looks there, and makes no system call.
"""

import contextlib
import fcntl
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import RequestError
from headrace.ipc.messages import HttpRequest, share_key
from headrace.testing.recorded_request import RecordedRequest
from headrace.testing.script import Script, ScriptedAnswer, ScriptRule

MAX_TAKEN = 1024  # answers of requests that may be sent again
MAX_RECORDED_BYTES = 256 << 20  # of requests; later ones are not recorded


class NoScriptedResponse(RequestError):
    """No rule of the script matches a request, or none that does has an answer left."""

    code = "no_scripted_answer"

    def __init__(self, text: str) -> None:
        shown = text if len(text) <= 200 else text[:200] + "..."
        super().__init__(
            f"the script has no answer left for this request, whose last message is {shown!r}; "
            "add an answer or a rule, or set repeat"
        )


class Progress(msgspec.Struct):
    """A script, and how much of it has been used."""

    rules: list[ScriptRule] = []
    used: list[int] = []  # answers of each rule
    taken: dict[int, tuple[int, int]] = {}  # by a request's first id: its rule, and which answer


class ScriptStore:
    """The files of one server. Each call looks at them anew."""

    def __init__(self, run_dir: str) -> None:
        folder = Path(run_dir)
        self._lock, self._script = folder / "script.lock", folder / "script.msgpack"
        self._requests = folder / "script_requests.jsonl"
        with self._lock.open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, 1)
        with self._lock.open("rb") as file:
            self._flag = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)

    @property
    def is_open(self) -> bool:
        """Whether something at `/mock` has been asked for."""
        return self._flag[0] != 0

    @property
    def has_rules(self) -> bool:
        """Whether a script says what is answered."""
        return self.is_open and bool(self._read().rules)

    def open(self) -> None:
        """Begin to record requests."""
        with self._locked():
            if not self.is_open:
                self._write(Progress())

    def put(self, script: Script) -> None:
        """Take a script in place of the last one; none of its answers has been used."""
        with self._locked():
            self._write(Progress(script.rules, [0] * len(script.rules)))

    def num_left(self) -> list[int]:
        """Return how many answers of each rule have not been used."""
        progress = self._read()
        pairs = zip(progress.rules, progress.used, strict=True)
        return [max(0, len(rule.answers) - used) for rule, used in pairs]

    def take(self, http: HttpRequest, model: str | None, text: str) -> ScriptedAnswer:
        """Use the next answer for a request; one that is sent again gets the same.

        Args:
            text: the last message.

        Raises:
            NoScriptedResponse: there is none.
        """
        with self._locked():
            progress = self._read()
            if http.first_id in progress.taken:
                place, used = progress.taken[http.first_id]
                return response_at(progress.rules[place], used)
            for place, rule in enumerate(progress.rules):
                used = progress.used[place]
                is_left = rule.repeat or used < len(rule.answers)
                if is_left and matches(rule, http.key, model, text):
                    progress.used[place] += 1
                    progress.taken[http.first_id] = place, used
                    if len(progress.taken) > MAX_TAKEN:
                        del progress.taken[next(iter(progress.taken))]
                    self._write(progress)
                    return response_at(rule, used)
        raise NoScriptedResponse(text)

    def give_back(self, http: HttpRequest) -> None:
        """Have the answer of a refused request used by the next one, if no other has come since."""
        with self._locked():
            progress = self._read()
            if http.first_id not in progress.taken:
                return
            place, used = progress.taken.pop(http.first_id)
            if progress.used[place] == used + 1:
                progress.used[place] = used
            self._write(progress)

    def record(self, http: HttpRequest, body: dict[str, Any]) -> None:
        """Remember a request, unless it is sent again or there are too many."""
        line = msgspec.json.encode(RecordedRequest(http.path, http.received_at, body))
        with self._locked(), self._requests.open("ab") as file:
            if not http.origin and file.tell() < MAX_RECORDED_BYTES:
                file.write(line + b"\n")

    def recorded(self) -> bytes:
        """Return all requests in their order, as a JSON list."""
        lines: list[bytes] = []
        with contextlib.suppress(FileNotFoundError):
            lines = self._requests.read_bytes().splitlines()
        return msgspec.json.encode([msgspec.Raw(line) for line in lines])

    def forget(self) -> None:
        """Forget all requests."""
        with self._locked():
            self._requests.unlink(missing_ok=True)

    def _read(self) -> Progress:
        return msgspec.msgpack.decode(self._script.read_bytes(), type=Progress)

    def _write(self, progress: Progress) -> None:
        new = self._script.with_suffix(".new")
        new.write_bytes(msgspec.msgpack.encode(progress))
        new.rename(self._script)
        with self._lock.open("r+b") as file:
            file.write(b"\1")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def response_at(rule: ScriptRule, place: int) -> ScriptedAnswer:
    """Return an answer of a rule, which may begin anew."""
    return rule.answers[place % len(rule.answers)]


def matches(rule: ScriptRule, key: int, model: str | None, text: str) -> bool:
    """Whether a rule is for a request."""
    return (
        (rule.model is None or rule.model == model)
        and (rule.contains is None or rule.contains in text)
        and (rule.pattern is None or re.search(rule.pattern, text) is not None)
        and (rule.api_key is None or share_key(rule.api_key.encode()) == key)
    )
