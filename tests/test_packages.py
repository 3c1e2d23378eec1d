"""What an install brings to a user: packages, their data and their types."""

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from headrace import __version__

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
UI, DIST = "frontend/ui/", "frontend/ui/dist/"  # sources of web pages, and what is built of them
SCRIPT = """
from headrace import ApiError, AsyncClient, AsyncEngine, Client, Engine, SamplingParams
from headrace.client.responses import ChatCompletion, Completion

def chat(client: Client) -> ChatCompletion:
    try:
        return client.with_options(timeout_s=5).chat("Hi", max_tokens=3)
    except ApiError as error:
        raise SystemExit(error.message) from error

async def complete(client: AsyncClient) -> Completion:
    texts: list[str] = [text async for text in client.stream_complete("1, 2")]
    return await client.complete(texts)

def generate(engine: Engine) -> list[str]:
    outputs = engine.generate(["1, 2"], SamplingParams(max_tokens=4))
    return [output.text for output in outputs]

async def generate_async(engine: AsyncEngine) -> int:
    (output,) = await engine.generate("1, 2", SamplingParams(temperature=0))
    return output.usage.total_tokens
"""
WRONG = """
def wrong(client: Client, engine: Engine) -> None:
    client.chat("Hi").nothing
    engine.generate("Hi")[0].nothing
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What mypy knows of the dependencies, for several checks."""
    return tmp_path_factory.mktemp("mypy")


def checked(python: Path, folder: Path, cache: Path) -> list[str]:
    """Return what mypy says of a user's script that has two wrong lines at its end."""
    (folder / "script.py").write_text(SCRIPT + WRONG)
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python)]
    command += ["--cache-dir", str(cache)]
    result = subprocess.run([*command, "script.py"], cwd=folder, capture_output=True, text=True)
    return result.stdout.splitlines()


def assert_only_wrong_lines_are_told(lines: list[str]) -> None:
    wrong = [line for line in lines if "error:" in line]
    assert ["ChatCompletion" in wrong[0], "RequestOutput" in wrong[1]] == [True, True], lines
    assert (len(wrong), len(lines)) == (2, 3), lines


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python files and the data that a wheel holds."""
    folder = tmp_path_factory.mktemp("built")
    egg_info = ["egg_info", "--egg-base", str(folder)]
    build = ["build_py", "--build-lib", str(folder / "lib")]
    command = [sys.executable, "setup.py", "--quiet", *egg_info, *build]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return folder / "lib"


def test_editable_install_is_typed(tmp_path: Path, cache: Path) -> None:
    assert_only_wrong_lines_are_told(checked(Path(sys.executable), tmp_path, cache))


def test_wheel_is_typed(built: Path, tmp_path: Path, cache: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "headrace").symlink_to(built / "headrace")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    assert_only_wrong_lines_are_told(checked(tmp_path / "venv/bin/python", tmp_path, cache))


def test_wheel_holds_every_module_and_its_data(built: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    folders = [path.name for path in (ROOT / "headrace").iterdir() if path.is_symlink()]
    expected = {
        name if name.startswith("headrace/") else f"headrace/{name}"
        for name in listed
        if name.split("/")[0] in ("headrace", *folders) and (ROOT / name).is_file()
        if name.endswith((".py", ".json", ".cuh", ".jinja", "py.typed")) or name.startswith(DIST)
        if name.startswith(DIST) or not name.startswith(UI)
    }
    files = {str(path.relative_to(built)) for path in built.rglob("*") if path.is_file()}
    assert files == expected


def version_of(folder: Path) -> str:
    """Return the version that the project of a folder is built with."""
    command = [sys.executable, "setup.py", "--quiet", "--version"]
    told = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return told.stdout.split()[-1]


def test_versions_come_from_tags(tmp_path: Path) -> None:
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "headrace/__init__.py"):
        copy = tmp_path / name.replace("headrace/", "src/headrace/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    assert version_of(tmp_path) == __version__, "without git"
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    for git in (["init"], ["add", "."], [*identity, "commit", "-m", "x"]):
        subprocess.run(["git", "-C", tmp_path, *git], check=True, capture_output=True)
    assert version_of(tmp_path).startswith(f"{__version__}.dev1+g")
    subprocess.run(["git", "-C", tmp_path, "tag", f"v{__version__}"], check=True)
    assert version_of(tmp_path) == __version__
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.4\nVersion: 7.8.9\n")
    assert version_of(tmp_path) == "7.8.9", "of an sdist"


def test_editable_install_adds_no_other_top_level_name() -> None:
    names = ["bench", "csrc", "detokenizer_proc", "engine_proc", "frontend", "tests"]
    code = "import importlib.util, sys; print(*map(importlib.util.find_spec, sys.argv[1:]))"
    result = subprocess.run(
        [sys.executable, "-P", "-c", code, *names], capture_output=True, text=True, check=True
    )
    assert set(result.stdout.split()) == {"None"}


def test_kernels_named_in_setup_are_files() -> None:
    names = re.findall(r'"(\w+\.cpp)": lambda', (ROOT / "setup.py").read_text())
    assert names and all((ROOT / "csrc/cpu" / name).is_file() for name in names), names


def test_text_and_http_compile_for_arm64() -> None:
    """What the test of arm64's kernels, which runs the rest of the core, leaves out."""
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None:
        pytest.skip("needs Debian's g++-aarch64-linux-gnu")
    python = sysconfig.get_path("include")
    command = [compiler, "-fsyntax-only", "-std=c++17", "-Wall", "-Werror", "-DPy_LIMITED_API"]
    sources = [path for part in ("text", "http", ".") for path in ROOT.glob(f"csrc/{part}/*.cpp")]
    command += ["-Icsrc", f"-I{python}", *map(str, sorted(sources))]
    subprocess.run(command, cwd=ROOT, check=True)
