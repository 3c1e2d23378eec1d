"""The error tree. Texts are fit for clients; internals go to the log."""

import math
import sys
from typing import NoReturn

import msgspec

from headrace.exit_status import ExitStatus

# What msgspec raises where a file or a body is not the JSON it should be.
BAD_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
MAX_END = 1000  # characters at each end of a long message
# By status. https://docs.anthropic.com/en/api/errors
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def anthropic_type(status: int) -> str:
    """Return what Anthropic calls an error of an HTTP status."""
    return ANTHROPIC_TYPES.get(status, "api_error")


def in_a_line(error: Exception) -> str:
    """Return the first line of an error that may fill a page, with the text it announces."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    num_lines = 2 if lines and lines[0].endswith(":") else 1
    return " ".join(lines[:num_lines]) or type(error).__name__


def without_middle(message: str) -> str:
    """Return a message, of a long one only its ends: it may repeat a value of megabytes."""
    if len(message) <= 2 * MAX_END:
        return message
    return f"{message[:MAX_END]} … {message[-MAX_END:]}"


class HeadraceError(Exception):
    """Anything Headrace reports in one line rather than with a traceback.

    A process that cannot go on for it ends with `exit_status`.
    """

    exit_status = ExitStatus.HOPELESS


class ConfigError(HeadraceError):
    """A flag has a value that cannot work; the text names the flag and what would be right."""

    exit_status = ExitStatus.BAD_FLAGS


class ModelError(HeadraceError):
    """The model's files cannot be used; the text names the file and what would be right."""

    exit_status = ExitStatus.BAD_MODEL


def end_command(prog: str, error: HeadraceError) -> NoReturn:
    """End a command in one line, with a server's status where a flag or the model is at fault."""
    is_input = isinstance(error, ConfigError | ModelError)
    print(f"{prog}: error: {error}", file=sys.stderr)
    sys.exit(error.exit_status if is_input else ExitStatus.FAILED)


class EngineDied(HeadraceError):
    """The ring behind an `Engine` has ended; the text names the process that ended it, and how."""


class RequestError(HeadraceError):
    """A request that is refused: its HTTP status and OpenAI's `type`, `code` and `param`."""

    status = 400
    type = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(without_middle(message))
        self.param = param
        self.headers: list[tuple[str, str]] = []  # of the response, names in lower case

    def rename(self, param: str) -> None:
        """Call the field by another name, which the text begins with."""
        self.args = (str(self).replace(f"{self.param}: ", f"{param}: ", 1),)
        self.param = param


class InvalidBody(RequestError):
    """The body is not the JSON this route takes."""

    code = "invalid_body"


class InvalidValue(RequestError):
    """A field has a value outside its range."""

    code = "invalid_value"


class Unsupported(RequestError):
    """A field of OpenAI's that this server does not offer."""

    code = "unsupported_parameter"


class ModelNotFound(RequestError):
    """The request names a model this server does not serve."""

    status, code = 404, "model_not_found"

    def __init__(self, model: str, *served: str) -> None:
        names = ", ".join(f"'{name}'" for name in served)
        super().__init__(f"the model '{model}' does not exist; this server has {names}", "model")


class RouteNotFound(RequestError):
    """No such path."""

    status, code = 404, "not_found"

    def __init__(self, path: str) -> None:
        super().__init__(f"there is nothing at {path}")


class MethodNotAllowed(RequestError):
    """The path exists, for another method."""

    status, code = 405, "method_not_allowed"

    def __init__(self, method: str, path: str, allowed: str) -> None:
        super().__init__(f"{path} takes {allowed}, not {method}")
        self.headers = [("allow", "GET, HEAD" if allowed == "GET" else allowed)]


class ContextLengthExceeded(RequestError):
    """The prompt is too long, or leaves no room for the output."""

    code = "context_length_exceeded"

    def __init__(
        self,
        num_prompt: int,
        max_tokens: int | None,
        limit: int,
        param: str,
        is_estimate: bool = False,
    ) -> None:
        """With `is_estimate` the prompt has `num_prompt` tokens or more."""
        has = "have" if param.endswith("s") else "has"
        asked = "" if max_tokens == 0 else ", which leaves no room for a new token"
        super().__init__(
            f"this model's maximum context length is {limit} tokens; the {param} {has} "
            f"{'at least ' if is_estimate else ''}{num_prompt}{asked}",
            param,
        )


class WrongKind(RequestError):
    """Text was asked of an embedding model, or embeddings of one that generates."""

    code = "unsupported_model"


class InternalError(RequestError):
    """An internal error; the log has the details."""

    status, type, code = 500, "server_error", "internal_error"

    def __init__(
        self, message: str = "the server failed to handle this request; its log says why"
    ) -> None:
        super().__init__(message)


class DeadlyRequest(InternalError):
    """Processes have died while they were at this request alone, or could not compute it."""

    def __init__(self) -> None:
        super().__init__("the server failed at this request; its log says why")


class QueueFull(RequestError):
    """Too many requests wait already."""

    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"

    def __init__(self) -> None:
        super().__init__("too many requests are waiting (--max-num-queued); try again later")


class ModelNotLoaded(RequestError):
    """The model's files cannot be used now, or its engine does not start."""

    status, type, code = 503, "server_error", "model_not_loaded"

    def __init__(self, model: str, why: str, retry_s: float) -> None:
        seconds = math.ceil(retry_s)
        super().__init__(
            f"the model '{model}' could not be loaded: its engine {why}; it is tried again after "
            f"{seconds} s"
        )
        self.headers = [("retry-after", str(seconds))]


class ScriptedError(RequestError):
    """An error of a script of a mock engine's server."""

    def __init__(self, status: int, message: str, type: str, code: str | None) -> None:
        super().__init__(message)
        self.status, self.type, self.code = status, type, code


class StreamsFull(RequestError):
    """Too many clients read the events of the ring already."""

    status, type, code = 503, "overloaded_error", "overloaded"

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} clients read these events already; close one of them")


class ApiError(HeadraceError):
    """An error response, as a client raises it: the HTTP status and OpenAI's `code` and `param`.

    `retry_after_s` is the server's `Retry-After`, in seconds, where it sends one.
    """

    retry_after_s: float | None = None

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}" if self.code else self.message


class ApiConnectionError(ApiError):
    """No whole answer came: no server is there, or the connection broke. `status` is 0."""

    def __init__(self, message: str) -> None:
        super().__init__(0, message)


class ApiTimeoutError(ApiConnectionError):
    """The server was silent for longer than `timeout_s`."""
