"""A server's record, played to each of its processes alone."""

import dataclasses
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest
from servers import RunningServer

from headrace.board.board import Seat
from headrace.cli import replay as replay_module
from headrace.cli.replay import read_burst, replay, seat_named
from headrace.errors import HeadraceError

CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
REQUESTS: list[tuple[str, dict[str, object]]] = [
    ("chat/completions", CHAT | {"max_tokens": 40, "n": 2}),
    ("chat/completions", CHAT | {"max_tokens": 20, "logprobs": True}),
    ("completions", {"prompt": ["a b", "c"], "max_tokens": 9}),
    ("completions", {"prompt": "x", "max_tokens": -1}),
    ("responses", {"input": "hello", "max_output_tokens": 30, "stream": True}),
    ("messages", CHAT | {"model": "SmolLM2-135M-Instruct", "max_tokens": 30}),
]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("record") / "of-a-server"
    server = RunningServer("--engine", "mock", "--record", str(folder))
    with httpx.Client() as client, ThreadPoolExecutor(4) as pool:
        post = lambda request: client.post(f"{server.url}/v1/{request[0]}", json=request[1])  # noqa: E731
        statuses = [response.status_code for response in pool.map(post, 5 * REQUESTS)]
        client.get(f"{server.url}/metrics")
    server.close()
    assert (statuses.count(200), statuses.count(400)) == (25, 5)
    yield folder


@pytest.mark.parametrize(
    ("process", "keeps_pace"),
    [("tokenizer-0", False), ("engine", False), ("detokenizer-0", True), ("detokenizer-0", False)],
)
def test_a_process_alone_gives_the_answers_that_were_recorded(
    process: str, keeps_pace: bool, record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = replay(record, seat_named(process), keeps_pace)
    said = capsys.readouterr().out
    assert status == 0, said
    assert re.search(r" 0: \d+ messages in \d.* \(recorded in \d", said)
    assert re.search(r"p50 .* p99 .* max .* ms", said)
    same = re.search(r"the same as recorded: (\d+); without a recorded one: 0", said)
    assert same is not None
    assert int(same[1]) >= 20


@pytest.mark.parametrize(
    ("fields", "is_mock"),
    [
        ({"engine": "auto"}, True),  # has weights
        (
            {
                "gateway": {
                    "listen": "tcp://127.0.0.1:*",
                    "key_file": "gone",
                    "terms": {},
                    "prefix_fds": [0],
                }
            },
            False,
        ),
    ],
)
def test_recording_of_another_engine_replays_on_the_mock(
    fields: dict[str, object],
    is_mock: bool,
    record: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also that of an engine that listened: it would wait for the server."""
    burst = replay_module.read_burst(record, Seat("engine", 0))
    assert burst is not None
    config = msgspec.msgpack.decode(burst.note.config) | fields
    note = msgspec.structs.replace(burst.note, config=msgspec.msgpack.encode(config))
    other = dataclasses.replace(burst, note=note)
    monkeypatch.setattr(
        replay_module,
        "read_burst",
        lambda folder, seat: other if seat.role == "engine" else read_burst(folder, seat),
    )
    assert replay(record, Seat("engine", 0), keeps_pace=False, is_mock=is_mock) == 0
    assert "engine 0: " in capsys.readouterr().out


def test_an_answer_that_differs_is_reported(
    record: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    messages_of = replay_module.messages_of

    def falsified(folder: Path, burst: replay_module.Burst) -> Iterator[object]:
        for message, bulk in messages_of(folder, burst):
            yield message, bulk.replace(b'"message"', b'"passage"')

    monkeypatch.setattr(replay_module, "messages_of", falsified)
    assert replay(record, Seat("tokenizer", 0), keeps_pace=False) == 1
    assert "\ndifferent: 5 (" in capsys.readouterr().out


def test_another_version_s_record_is_not_played(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_module, "fingerprint", lambda: "another")
    with pytest.raises(HeadraceError, match="was recorded by another version of headrace"):
        replay(record, Seat("tokenizer", 0), keeps_pace=False)


def test_what_cannot_be_played_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_module.logs, "setup", lambda *_: None)
    (tmp_path / "engine-0.record").write_bytes(b"no record")
    for process, says in [
        ("worker-0", "--process worker-0: it must be one of tokenizer-0, engine, mock"),
        ("tokenizer-0", f"{tmp_path} has no messages of tokenizer 0"),
        ("engine", f"{tmp_path}/engine-0.record is not a record"),
        ("mock", f"{tmp_path}/engine-0.record is not a record"),
    ]:
        with pytest.raises(SystemExit) as ended:
            replay_module.main([str(tmp_path), "--process", process])
        assert ended.value.code == (2 if process == "worker-0" else 1)
        assert says in capsys.readouterr().err
