"""A conversation goes on from what has been said, whatever becomes of an answer."""

import json
from collections.abc import Callable

import httpx
import pytest

from headrace.cli.chat import NEW, ChatSession, connect, converse
from headrace.client.client import Client
from headrace.errors import ApiError, ConfigError, HeadraceError


class Echo:
    """A server that says what it was told last, in pieces, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.bodies: list[dict[str, object]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        self.asked.append([message["content"] for message in body["messages"]])
        said = self.asked[-1][-1]
        if said == "refuse":
            return httpx.Response(400, json={"error": {"message": "no", "code": "x"}})
        deltas = [{"choices": [{"index": 0, "delta": {"content": letter}}]} for letter in said]
        events = "".join(f"data: {json.dumps(delta)}\n\n" for delta in deltas)
        return httpx.Response(200, text=f"{events}data: [DONE]\n\n")


@pytest.fixture
def echo() -> Echo:
    return Echo()


def talk(echo: Echo, *lines: str, write: Callable[[str], object] | None = None) -> str:
    """Say some lines; return what is written."""
    written: list[str] = []
    with Client(transport=httpx.MockTransport(echo)) as client:
        conversation = ChatSession(client, "Be brief.", {"temperature": 0})
        converse(conversation, lines, write or written.append)
    return "".join(written)


def test_every_answer_is_part_of_what_is_asked_next(echo: Echo) -> None:
    assert talk(echo, "one", "", "two") == "one\ntwo\n"
    assert echo.asked == [["Be brief.", "one"], ["Be brief.", "one", "one", "two"]]
    assert {body["temperature"] for body in echo.bodies} == {0}


def test_a_new_conversation_forgets_the_old(echo: Echo) -> None:
    talk(echo, "one", NEW, "two")
    assert echo.asked[-1] == ["Be brief.", "two"]


def test_what_is_refused_has_not_been_said(echo: Echo) -> None:
    assert talk(echo, "refuse", "two") == "error: 400 x: no\ntwo\n"
    assert echo.asked[-1] == ["Be brief.", "two"]


def test_an_answer_that_is_stopped_counts_as_far_as_it_came(echo: Echo) -> None:
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        if "".join(written) == "on":
            raise KeyboardInterrupt

    talk(echo, "one", "two", write=write)
    assert "".join(written) == "on …\ntwo\n"
    assert echo.asked[-1] == ["Be brief.", "one", "on", "two"]


def test_a_server_that_is_not_there_is_reported() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    written: list[str] = []
    with Client(transport=httpx.MockTransport(refuse)) as client:
        converse(ChatSession(client, None, {}), ["Hi"], written.append)
    assert "".join(written) == "error: http://127.0.0.1:8000 cannot be reached: refused\n"


def test_a_url_is_that_of_the_server_or_of_its_api() -> None:
    for url in ("http://host:1", "http://host:1/", "http://host:1/v1"):
        with connect([url]) as client:
            assert client.url == "http://host:1"


def test_keys_come_from_a_flag_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "secret")
    with connect(["http://host"]) as client:
        assert client._http.headers["authorization"] == "Bearer secret"
    with connect(["http://host", "--api-key", "other"]) as client:
        assert client._http.headers["authorization"] == "Bearer other"


def test_a_model_is_served_for_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []

    def launch(model: str | None, **flags: object) -> Client:
        launched.append((model, flags))
        return Client()

    monkeypatch.setattr(Client, "launch", launch)
    for argv in (["org/m", "--max-num-seqs", "3"], []):
        connect(argv).close()
    assert launched == [("org/m", {"max_num_seqs": 3}), (None, {})]


def test_a_server_that_runs_takes_no_flags() -> None:
    with pytest.raises(HeadraceError, match="max_num_seqs: flags need a MODEL; a running server"):
        connect(["http://host", "--max-num-seqs", "3"])
    with pytest.raises(ConfigError, match="--sistem is not known"):
        connect(["--sistem"])
    assert issubclass(ApiError, HeadraceError)
