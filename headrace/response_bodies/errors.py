"""Bodies of errors, in the shapes of OpenAI's, Anthropic's, Cohere's and Jina's APIs."""

from headrace.errors import RequestError, anthropic_type
from headrace.response_bodies.base import Typed, Whole


class ErrorBody(Whole):
    """Why a request fails."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Whole):
    """The body of every error."""

    error: ErrorBody


class AnthropicErrorBody(Whole):
    """Why a request fails, in Anthropic's words."""

    type: str
    message: str


class AnthropicError(Typed, tag="error"):
    """The body of every error of Anthropic's API, and the last event of a stream that fails."""

    error: AnthropicErrorBody


class CohereError(Whole):
    """The body of every error of Cohere's API: https://docs.cohere.com/reference/errors."""

    message: str


class JinaError(Error):
    """The body of every error of paths that are Jina's, too: its clients read `detail`."""

    detail: str


def openai_error(error: RequestError) -> Error:
    """Return an error in OpenAI's shape."""
    body = ErrorBody(message=str(error), type=error.type, param=error.param, code=error.code)
    return Error(error=body)


def anthropic_error(error: RequestError) -> AnthropicError:
    """Return an error in Anthropic's shape."""
    kind = anthropic_type(error.status)
    return AnthropicError(error=AnthropicErrorBody(type=kind, message=str(error)))


def cohere_error(error: RequestError) -> CohereError:
    """Return an error in Cohere's shape."""
    return CohereError(message=str(error))


def jina_error(error: RequestError) -> JinaError:
    """Return an error in OpenAI's and in Jina's shape."""
    return JinaError(error=openai_error(error).error, detail=str(error))
