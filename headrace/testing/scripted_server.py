"""A server for tests: its script, the requests that it has had, and its log."""

import contextlib
import os
import tempfile
from collections.abc import Sequence
from typing import Any, Self

import httpx
import msgspec

from headrace.config.flags import parse
from headrace.errors import ConfigError
from headrace.launch.local_server import LocalServer
from headrace.routes import MOCK_REQUESTS, MOCK_SCRIPT, TOKENIZE
from headrace.testing.recorded_request import RecordedRequest
from headrace.testing.script import ScriptedAnswer, ScriptRule, ScriptState, script_of

TIMEOUT_S = 60.0
MOCK = "mock"
MAX_LOG_BYTES = 64 << 10  # reported of a log


class ScriptedServer:
    """A server on a free port that ends with this object, or with this process."""

    def __init__(self, model: str | None = None, engine: str = MOCK, args: Sequence[str] = ()):
        """Start it and wait until it serves.

        Args:
            model: as in `launch_server`; None is the demo model.
            engine: `mock` answers as a script says and loads no weights; `auto` runs the model.
            args: further flags of `launch_server`.

        Raises:
            HeadraceError: it cannot start; the text says why, and has the log.
        """
        flags = {"log_level": "info"} | parse(args) | {"engine": engine}
        if model is None and engine == MOCK:
            flags.setdefault("reasoning_parser", "qwen3")  # else a script could have no thoughts
        self._engine = engine
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        try:
            self._server = LocalServer(model, flags, self._log.fileno())
        except BaseException as error:
            error.add_note(self.log())
            self._log.close()
            raise
        key = self._server.api_key
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT_S)
        self._is_open = True

    @property
    def url(self) -> str:
        """Where it is, without a path; Anthropic's clients take this."""
        return self._server.url

    @property
    def base_url(self) -> str:
        """The same with `/v1`, as OpenAI's clients take it."""
        return f"{self.url}/v1"

    @property
    def api_key(self) -> str:
        """A key that it takes: any text, unless a flag names one."""
        return self._server.api_key or "headrace"

    def script(self, items: Sequence[ScriptedAnswer | ScriptRule], repeat: bool = False) -> None:
        """Say what is answered from now on. Without items it is words of the mock's own.

        Args:
            items: rules, and answers for requests that match none, in order.
            repeat: begin anew after the last of these answers.

        Raises:
            ConfigError: the engine is no mock, or an item has a value that cannot work.
        """
        self._mock("PUT", MOCK_SCRIPT, content=msgspec.json.encode(script_of(items, repeat)))

    @property
    def requests(self) -> list[RecordedRequest]:
        """The requests for texts since the last `reset`, refused ones among them."""
        return msgspec.json.decode(self._mock("GET", MOCK_REQUESTS), type=list[RecordedRequest])

    @property
    def num_left(self) -> int:
        """How many answers of the script have not been used."""
        return sum(msgspec.json.decode(self._mock("GET", MOCK_SCRIPT), type=ScriptState).num_left)

    def num_tokens(self, text: str) -> int:
        """Return how many tokens a text is. The usage of a reply counts its end token, too."""
        body = {"prompt": text, "add_special_tokens": False}
        count: int = msgspec.json.decode(self._ask("POST", TOKENIZE, json=body))["count"]
        return count

    def reset(self) -> None:
        """Forget the script and all requests."""
        if self._engine == MOCK:
            self.script([])
            self._mock("DELETE", MOCK_REQUESTS)

    def _mock(self, method: str, path: str, **options: Any) -> bytes:
        if self._engine != MOCK:
            raise ConfigError(
                f"scripts and recorded requests need the mock engine; this server has "
                f"--engine {self._engine}"
            )
        return self._ask(method, path, **options)

    def _ask(self, method: str, path: str, **options: Any) -> bytes:
        response = self._http.request(method, path, **options)
        if response.is_error:
            raise ConfigError(response.json()["error"]["message"])
        return response.content

    @property
    def log_size(self) -> int:
        """How many bytes its log has."""
        return os.fstat(self._log.fileno()).st_size

    def log(self, start: int = 0) -> str:
        """Return its log from a byte on, the end of a long one."""
        begin = max(start, self.log_size - MAX_LOG_BYTES)
        return os.pread(self._log.fileno(), MAX_LOG_BYTES, begin).decode(errors="replace")

    def close(self) -> None:
        """End it, and leave nothing of it."""
        if self._is_open:
            self._is_open = False
            self._http.close()
            self._server.stop()
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be ending
            self.close()
