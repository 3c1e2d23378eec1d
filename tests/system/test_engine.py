"""The engine within a program, with a real model: exact, and gone when it should be."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from readable import readable
from reference import NUM_TOKENS, Expected
from servers import PATIENCE_S, shared_memory_files, survivors, wait_until

from headrace import AsyncEngine, Engine, SamplingParams
from headrace.errors import ApiError, ConfigError, EngineDied

EXACT: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_dtype": "float32"}
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
ENDLESS = SamplingParams(max_tokens=8000, ignore_eos=True)
START_S = 300
PROGRAM = """
import os, signal, time
from headrace import Engine, SamplingParams
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
engine = Engine(device="cpu")
if os.fork() == 0:  # a fork neither ends the ring nor keeps it
    os.close(1), os.close(2)
    time.sleep(600)
    os._exit(0)
texts = engine.stream("x", SamplingParams(max_tokens=8000, ignore_eos=True))
next(texts)
print("runs", flush=True)
for _ in texts:
    pass
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """An engine with two processes of each kind that can have several, exact as transformers is."""
    with Engine(tokenizer_procs=2, detokenizer_procs=2, **EXACT) as made:
        yield made


@pytest.fixture
def run_dirs(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the run directories of the test's engines are."""
    monkeypatch.setenv("TMPDIR", str(socket_folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return socket_folder


def ring_of(process: psutil.Process) -> set[psutil.Process]:
    """Return the processes of the engines of a process, and of its servers."""
    found = set()
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            found |= {child for title in child.cmdline()[:1] if title.startswith("headrace: ")}
    return found


def memory_files() -> list[str]:
    """Return what shared memory of engines this process has open, without garbage."""
    gc.collect()
    opened = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            opened.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [file for file in opened if file.startswith("/memfd:headrace")]


def test_greedy_answers_equal_transformers(engine: Engine, expected: list[Expected]) -> None:
    outputs = engine.generate([case.prompt_ids for case in expected], GREEDY, stop_token_ids=[])
    answers = engine.chat([case.messages for case in expected], GREEDY)
    for case, output, answer in zip(expected, outputs, answers, strict=True):
        assert output.text == answer.text == case.text(NUM_TOKENS)
        assert output.outputs[0].finish_reason == case.finish_reason(NUM_TOKENS)
        assert output.usage.completion_tokens == len(case.ids)


def test_threads_and_streams_are_exact(engine: Engine, expected: list[Expected]) -> None:
    def text(case: Expected) -> str:
        return "".join(engine.stream_chat(case.prompt, GREEDY))

    with ThreadPoolExecutor(len(expected)) as pool:
        assert list(pool.map(text, expected)) == [case.text(NUM_TOKENS) for case in expected]


def test_what_the_server_refuses_is_raised(engine: Engine) -> None:
    with pytest.raises(ApiError, match="400 invalid_value: top_p: must be above 0"):
        engine.generate("x", SamplingParams(top_p=0))
    with pytest.raises(ApiError, match="context_length_exceeded"):
        engine.generate(["x", "y " * 9000], SamplingParams(max_tokens=1))
    with pytest.raises(ApiError, match="n: must be an integer"):
        engine.generate("x", n="three")


def test_a_closed_stream_frees_its_place(engine: Engine) -> None:
    with contextlib.closing(engine.stream("x", ENDLESS)) as texts:
        next(texts)
    (output,) = engine.generate("1, 2, 3,", SamplingParams(max_tokens=2))
    assert output.usage.completion_tokens == 2


async def test_async_engine_is_exact_and_leaves_nothing(
    expected: list[Expected], run_dirs: Path
) -> None:
    in_shared_memory = shared_memory_files()
    mine_in_memory = memory_files()
    mine = ring_of(psutil.Process())
    async with AsyncEngine(**EXACT) as engine:
        ring = list(ring_of(psutil.Process()) - mine)
        assert list(run_dirs.iterdir())
        answers = await asyncio.gather(*(engine.chat(c.messages, GREEDY) for c in expected))
        assert [answer.text for (answer,) in answers] == [c.text(NUM_TOKENS) for c in expected]
        texts = [text async for text in engine.stream_chat(expected[0].prompt, GREEDY)]
        assert "".join(texts) == expected[0].text(NUM_TOKENS)
    del engine
    assert memory_files() == mine_in_memory
    assert not survivors(ring)
    assert not list(run_dirs.iterdir())
    assert shared_memory_files() == in_shared_memory


def test_texts_go_on_when_processes_die(expected: list[Expected]) -> None:
    mine = ring_of(psutil.Process())
    with Engine(**EXACT) as engine:
        for victim in ("tokenizer 0", "worker 0", "detokenizer 0", "engine"):
            titles = {p.cmdline()[0]: p for p in ring_of(psutil.Process()) - mine}
            texts = engine.stream_chat(expected[0].prompt, GREEDY)
            told = next(texts)
            titles[f"headrace: {victim}"].kill()
            assert told + "".join(texts) == expected[0].text(NUM_TOKENS)


def test_death_of_the_supervisor_is_an_error_that_names_it(run_dirs: Path) -> None:
    victim, says = "supervisor", "the supervisor was killed by SIGKILL"
    mine = ring_of(psutil.Process())
    with Engine(device="cpu") as engine:
        ring = list(ring_of(psutil.Process()) - mine)
        titles = [p.cmdline()[0] for p in ring]
        assert "headrace: engine" in titles
        assert not any("frontend" in title for title in titles)
        texts = engine.stream("x", ENDLESS)
        next(texts)
        next(p for p in ring if p.cmdline()[0] == f"headrace: {victim}").kill()
        with pytest.raises(EngineDied, match=says):
            list(texts)
        with pytest.raises(EngineDied, match=says):
            engine.generate("x")
    assert not survivors(ring)
    assert not list(run_dirs.iterdir())


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_the_ring_ends_with_its_program(ending: signal.Signals, run_dirs: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        ready = readable([program.stdout], START_S)
        assert ready and program.stdout.readline() == "runs\n"
        ring = list(ring_of(psutil.Process(program.pid)))
        assert len(ring) == 6, ring
        (fork,) = set(psutil.Process(program.pid).children(recursive=True)) - set(ring)
        program.send_signal(ending)
        assert not survivors(ring)
        fork.kill()
        _, said = program.communicate(timeout=PATIENCE_S)
    assert program.returncode == -ending
    assert ("KeyboardInterrupt" in said) == (ending == signal.SIGINT)
    wait_until(lambda: not list(run_dirs.iterdir()), "the run directory is removed")


@pytest.mark.parametrize(
    ("model", "flags", "error", "says"),
    [
        ("/no/such/model", {}, ConfigError, "^/no/such/model: no such file or folder$"),
        (None, {"max_model_len": 1000000}, ConfigError, "^--max-model-len 1000000 is more than "),
        (
            None,
            {"kv_cache_memory_bytes": 1000000},
            EngineDied,
            r"^engine 0 exited with 2 \(--kv-cache-memory-bytes 1000000 holds ",
        ),
    ],
)
def test_a_bad_start_is_one_clear_line(
    model: str | None, flags: dict[str, int], error: type[Exception], says: str, run_dirs: Path
) -> None:
    with pytest.raises(error, match=says) as failure:
        Engine(model, device="cpu", **flags)
    assert "\n" not in str(failure.value)
    assert not list(run_dirs.iterdir())


def test_no_process_is_killed_at_a_shutdown_under_load(
    capfd: pytest.CaptureFixture[str],
) -> None:
    texts = " ".join(map(str, range(1500))), "1 " * 400_000  # the second is a long body
    with Engine(device="cpu", log_level="info") as busy, ThreadPoolExecutor(4) as pool:
        # Nothing is waited for but the first token: `fastokens` is loaded meanwhile.
        streams = [busy.stream("x", ENDLESS) for _ in range(2)]
        for stream in streams:
            next(stream)
        asked = [pool.submit(busy.generate, [text] * 4, ENDLESS) for text in texts]
        busy.shutdown()
        assert all(isinstance(one.exception(), EngineDied | ApiError) for one in asked)
        for stream in streams:
            with pytest.raises(EngineDied):
                list(stream)
    log = capfd.readouterr().err
    assert "killing it" not in log
    assert "Traceback" not in log
