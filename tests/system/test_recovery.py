"""Processes are killed while they serve: no client may notice more than a pause."""

import asyncio
import contextlib
import gzip
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from killer import OPERATOR, Killer
from mutants.mutants import DEADLY_TOKEN, DEADLY_WORD, mutants
from servers import RunningServer, wait_until
from stream_reader import CHAT, COMPLETION, TALK, TIMEOUT_S, difference, read_all

from headrace.config.model_card import find_demo_model
from headrace.exit_status import ExitStatus
from support.ports import reserved_port

RENEWED = ("frontend", "tokenizer", "detokenizer")
CHAOS_S = float(os.environ.get("CHAOS_S", "6"))
KILLS_PER_S = 0.1 if CHAOS_S <= 60 else 0.01  # so that some live for long
SETTLED_S = 300.0  # by then caches have their size: an older process may not grow
MAX_GROWTH = 1.05
STORE_BYTES = 64 << 20
POLL_INTERVAL_S = 0.2  # between looks at `/health`


@pytest.fixture(scope="module")
def crashes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server's crash reports are."""
    return tmp_path_factory.mktemp("crashes")


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where its workers leave profiles."""
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def own_server(crashes: Path, profiles: Path) -> Iterator[RunningServer]:
    """A server to be maimed; fewer places than there are streams."""
    running = RunningServer(
        *("--frontend-procs", "2", "--tokenizer-procs", "2", "--detokenizer-procs", "2"),
        *("--kv-cache-dtype", "float32", "--max-num-seqs", "8", "--crash-dir", str(crashes)),
        *("--admin-api-key", "operator", "--profile-dir", str(profiles)),
    )
    yield running
    assert running.stop() == 0


async def read_beside_health(
    url: str, seen: Callable[[], None], tell: Callable[[list[str]], None]
) -> list[Any]:
    """Return what all requests are answered, and tell why `/health` was not good meanwhile."""
    reading = asyncio.create_task(read_all(url, seen))
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        while not reading.done():
            answer = await client.get("/health")
            tell(answer.json()["reasons"])
            await asyncio.wait([reading], timeout=POLL_INTERVAL_S)
    return await reading


@pytest.fixture(scope="module")
def undisturbed(own_server: RunningServer) -> list[Any]:
    """The answers without deaths."""
    answers = asyncio.run(read_all(own_server.url))
    assert not difference(asyncio.run(read_all(own_server.url)), answers), "they can be repeated"
    return answers


def crash_report_of(crashes: Path, process: psutil.Process) -> Any:
    """Return what is kept of the end of a process."""
    whole = f"[!.]*-{process.pid}.json"
    wait_until(lambda: any(crashes.glob(whole)), "a crash report")
    (path,) = crashes.glob(whole)
    return json.loads(path.read_text())


@pytest.mark.parametrize("victim", ["worker 0", "tokenizer 0", "detokenizer 0", "engine"])
def test_streams_go_on_when_a_process_dies(
    own_server: RunningServer, undisturbed: list[Any], crashes: Path, victim: str
) -> None:
    before = own_server.metric("process_restarts_total")
    killer = Killer(own_server, victim)
    while len(killer.killed) < 2:  # all may be answered before there is another to kill
        assert not difference(asyncio.run(read_all(own_server.url, killer)), undisturbed)
    restarts = before + len(killer.killed)
    wait_until(lambda: own_server.metric("process_restarts_total") >= restarts, "they are replaced")
    own_server.settle()
    own_server.await_free("kv_pages")
    wait_until(
        lambda: httpx.get(f"{own_server.url}/health").status_code == 200, "good health again"
    )
    crash_report = crash_report_of(crashes, killer.killed[0])
    assert crash_report["process"].startswith(victim)
    assert crash_report["ended"].endswith("was killed by SIGKILL")
    assert any("most recent call first" in " ".join(p["stacks"]) for p in crash_report["processes"])
    assert sum(process.get("open_requests", 0) for process in crash_report["processes"]) > 0


def test_an_engine_that_is_stuck_is_replaced(
    own_server: RunningServer, undisturbed: list[Any]
) -> None:
    killer = Killer(own_server, "engine", [60], signal.SIGSTOP)
    supervisor = own_server.ring["headrace: supervisor"]
    silences: list[str] = []

    def tell(reasons: list[str]) -> None:
        silences.extend(why for why in reasons if why.startswith("engine 0 has been silent for "))
        if silences:
            supervisor.resume()

    supervisor.suspend()  # it would end before the test could see it
    try:
        answers = asyncio.run(read_beside_health(own_server.url, killer, tell))
    finally:
        supervisor.resume()
    assert silences
    assert not difference(answers, undisturbed)
    assert killer.killed
    assert not killer.killed[0].is_running()


def test_operators_get_a_profile_of_steps(own_server: RunningServer, profiles: Path) -> None:
    with httpx.Client(base_url=own_server.url, headers=OPERATOR) as client:
        assert client.post("/start_profile").status_code == 202
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        client.post(COMPLETION, json=body).raise_for_status()
        assert client.post("/stop_profile").json() == {"accepted": ["stop_profile"]}
        wait_until(lambda: any(profiles.glob("worker-0-*")), "a profile")
    (path,) = profiles.glob("worker-0-*.trace.json.gz")
    steps = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert [step["args"]["tokens"] for step in steps] == [3, 1, 1, 1]


def test_operators_have_the_processes_of_a_role_replaced(own_server: RunningServer) -> None:
    with httpx.Client(base_url=own_server.url) as client:
        wait_until(lambda: client.get("/health").status_code == 200, "all are well")
        assert client.post("/admin/restart").status_code == 401
        starts: dict[str, dict[str, int]] = {}

        def are_new() -> bool:
            told = client.get("/admin/processes", headers=OPERATOR).json()["processes"]
            now = {p["process"]: p["starts"] for p in told[1:] if p["state"] == "ready"}
            starts.setdefault("before", now)
            starts["now"] = now
            names = ("detokenizer 0", "detokenizer 1")
            return all(now.get(name, 0) > starts["before"][name] for name in names)

        assert not are_new()
        asked = client.post("/admin/restart", params={"role": "detokenizer"}, headers=OPERATOR)
        assert (asked.status_code, asked.json()) == (202, {"accepted": ["detokenizer"]})
        wait_until(are_new, "other detokenizers")
    others = [
        {name: count for name, count in starts[when].items() if "detokenizer" not in name}
        for when in ("before", "now")
    ]
    assert others[0] == others[1]


def test_dead_frontend_takes_only_its_own_connections(
    own_server: RunningServer, undisturbed: list[Any]
) -> None:
    killer = Killer(own_server, "frontend 0", [60])
    answers = asyncio.run(read_all(own_server.url, killer))
    broken = [isinstance(answer, httpx.TransportError) for answer in answers]
    assert killer.killed
    whole = [(a, e) for a, e, cut in zip(answers, undisturbed, broken, strict=True) if not cut]
    assert [answer for answer, _ in whole] == [expected for _, expected in whole]
    wait_until(
        lambda: httpx.get(f"{own_server.url}/health").status_code == 200, "good health again"
    )
    assert not difference(asyncio.run(read_all(own_server.url)), undisturbed)


def test_rolling_restart_of_all_but_the_engine_is_seamless(
    own_server: RunningServer, undisturbed: list[Any]
) -> None:
    before = {title: process.pid for title, process in own_server.ring.items()}
    own_server.process.send_signal(signal.SIGHUP)

    def is_renewed() -> bool:
        assert not difference(asyncio.run(read_all(own_server.url)), undisturbed)
        now = {title: process.pid for title, process in own_server.ring.items()}
        return all(
            now.get(title) != before[title] for title in before if title.split()[1] in RENEWED
        )

    wait_until(is_renewed, "all are new")
    assert own_server.ring["headrace: engine"].pid == before["headrace: engine"]


class Memory:
    """What the processes of a server have in memory, from when each has settled."""

    def __init__(self) -> None:
        self._settled: dict[int, int] = {}  # bytes, by pid

    def look(self, server: RunningServer) -> None:
        """Assert that none has grown."""
        for title, process in server.ring.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                size = process.memory_info().rss
                if time.time() - process.create_time() > SETTLED_S:
                    settled = self._settled.setdefault(process.pid, size)
                    assert size <= MAX_GROWTH * settled, f"{title}: {settled} bytes, then {size}"


async def answers_beside_deadly_ones(url: str) -> tuple[list[Any], list[httpx.Response], str]:
    """Ask for what all requests say, beside one that workers die of and one that makes them.

    After these, one that tokenizers die of.
    """
    token, word = ({"prompt": p, "max_tokens": 5} for p in ([DEADLY_TOKEN], DEADLY_WORD))
    said = TALK | {"temperature": 0, "logit_bias": {DEADLY_TOKEN: 100}}
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        answers, prompted, saying = await asyncio.gather(
            read_all(url), client.post(COMPLETION, json=token), client.post(CHAT, json=said)
        )
        worded = await client.post(COMPLETION, json=word)
    return answers, [prompted, worded], saying.text


def is_loading(url: str) -> bool:
    """Whether a server says that it is loading its model."""
    try:
        answer = httpx.get(f"{url}/startup")
    except httpx.TransportError:
        return False
    return answer.status_code == 503 and "worker 0 is starting" in answer.json()["reasons"]


def test_requests_at_which_processes_die_fail_alone(undisturbed: list[Any], tmp_path: Path) -> None:
    """Before, a worker hangs while it loads; after, a detokenizer is busy with nothing."""
    with reserved_port() as port, ThreadPoolExecutor(1) as pool:
        url = f"http://127.0.0.1:{port}"
        seen, which = tmp_path / "seen", "engine=impatient,worker=deadly_token"

        def look() -> None:
            wait_until(lambda: is_loading(url), "HTTP before the model")
            seen.touch()

        looking = pool.submit(look)
        server = RunningServer(
            *("--kv-cache-dtype", "float32", "--max-num-seqs", "8", "--crash-dir", str(tmp_path)),
            *("--admin-api-key", "operator", "--async-scheduling", "--port", str(port)),
            env=mutants(f"{which},tokenizer=deadly_word,detokenizer=busybody")
            | {"SEEN": str(seen)},
        )
        looking.result()
    answers, prompted, saying = asyncio.run(answers_beside_deadly_ones(server.url))
    assert not difference(answers, undisturbed)
    for answer in prompted:
        assert answer.status_code == 500
        assert answer.json()["error"]["message"].startswith("the server failed at this")
    *_, last, done = saying.rstrip().split("\n\n")
    assert (json.loads(last[6:])["error"]["code"], done) == ("internal_error", "data: [DONE]")
    busy = server.ring["headrace: detokenizer 0"]
    busy.send_signal(signal.SIGUSR1)
    wait_until(lambda: not busy.is_running(), "it is replaced")
    httpx.post(f"{server.url}/admin/drain", headers=OPERATOR).raise_for_status()
    assert server.wait() == 0
    assert "detokenizer 0 has used 1 s of processor time for nothing; killing it" in server.log
    paths = sorted(tmp_path.glob("*-worker-0-*.json"))
    hanging, *crash_reports = [json.loads(path.read_text()) for path in paths]
    assert hanging["ended"] == "worker 0 is stuck"
    assert 3 <= len(crash_reports) <= 6
    assert sum(len(crash_report["requests_at_hand"]) == 1 for crash_report in crash_reports) >= 4
    worker = next(p for p in crash_reports[0]["processes"] if p["process"] == "worker 0")
    assert worker["stacks"][0] == "Fatal Python error: Segmentation fault"
    (deadly,) = crash_reports[-1]["requests_at_hand"]
    assert deadly in crash_reports[-1]["processes"][0]["requests"], "the frontend knows it, too"
    server.close()


def test_memory_hog_is_killed_and_unreplaceable_one_ends_server(
    tmp_path: Path,
) -> None:
    server = RunningServer("--crash-dir", str(tmp_path), env=mutants("detokenizer=glutton"))
    server.ring["headrace: detokenizer 0"].send_signal(signal.SIGUSR1)
    assert server.wait() == ExitStatus.HOPELESS
    assert re.search(r"detokenizer 0 has \d+ MiB of memory, more than its 400; killing", server.log)
    assert server.log.endswith(
        "detokenizer 0 exited with 1 (RuntimeError('once and never again'))\n"
    )
    crash_reports = [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())]
    assert [crash_report["ended"] for crash_report in crash_reports] == [
        "was killed by SIGKILL"
    ] + 3 * ["exited with 1"]
    assert crash_reports[-1]["log"][-1] == "RuntimeError: once and never again"
    server.close()


def test_chaos_changes_no_answer(undisturbed: list[Any], tmp_path: Path) -> None:
    """With `CHAOS_S=1800`, half an hour of it; in any case until processes have been replaced."""
    roles = ("worker", "tokenizer", "detokenizer", "engine", "kv_store")
    rules = [f"kill={role}:{KILLS_PER_S}/s" for role in roles]
    rules += [f"stop={role}:{KILLS_PER_S / 10}/s" for role in roles]
    server = RunningServer(
        *("--tokenizer-procs", "2", "--detokenizer-procs", "2", "--kv-cache-dtype", "float32"),
        *("--max-num-seqs", "8", "--async-scheduling", "--chaos", ",".join(rules)),
        *("--kv-store", str(tmp_path), "--kv-store-disk-bytes", str(STORE_BYTES)),
    )
    memory = Memory()
    end = time.monotonic() + CHAOS_S
    try:
        while time.monotonic() < end or server.metric("process_restarts_total") < 3:
            assert not difference(asyncio.run(read_all(server.url)), undisturbed)
            memory.look(server)
            assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) <= STORE_BYTES
    finally:
        server.close()
        print(server.log)


def test_the_server_ends_when_no_worker_can_start_again(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    shutil.copyfile(find_demo_model(), model)
    server = RunningServer(str(model), "--crash-dir", str(tmp_path / "crashes"))
    engine = server.ring["headrace: engine"]
    model.unlink()
    server.ring["headrace: worker 0"].kill()
    assert server.wait() == ExitStatus.BAD_MODEL
    assert server.log.count("starting again") == 3
    last = server.log.splitlines()[-1]
    assert "error: engine 0 exited with 3 (worker 0 could not start: " in last
    assert str(model) in last
    crash_report = crash_report_of(tmp_path / "crashes", engine)
    assert crash_report["ended"] == "exited with 3"
    assert sum("starting again" in line for line in crash_report["log"]) == 3
    server.close()
