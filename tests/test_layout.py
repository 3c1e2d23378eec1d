"""The rules of the tree: who imports whom, what files are called, how long they get."""

import ast
import dataclasses
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import __version__
from headrace.config import ServerConfig, flag_name

ROOT = Path(__file__).parents[1]
PROCESSES = ["frontend", "tokenizer_proc", "engine_proc", "detokenizer_proc", "fetcher_proc"]
MAX_LINES = 600
MAX_FUNCTION_LINES = 80
HEAVY = {"torch", "transformers", "tokenizers", "fastokens", "llguidance"}
JSON_CODECS = {"json", "orjson", "msgspec.json"}
NAMELESS = {"utils", "util", "helpers", "common", "misc", "manager"}


@functools.cache
def tracked(pattern: str) -> list[Path]:
    """Return the files of the repository that match."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run([*command, pattern], capture_output=True, text=True, check=True)
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


@functools.cache
def parsed(path: Path) -> list[ast.AST]:
    """Return all nodes of a file that there may be rules about."""
    kinds = ast.ImportFrom | ast.Import | ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


def imports(path: Path) -> set[str]:
    """Return the dotted names a file imports, however the import is written."""
    names = set()
    for node in parsed(path):
        if isinstance(node, ast.ImportFrom):
            names |= {node.module or ""} | {f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def imported_processes(path: Path) -> set[str]:
    """Return the process folders that a file imports."""
    return {
        process
        for process in PROCESSES
        for name in imports(path)
        if name.removeprefix("headrace.").split(".")[0] == process
    }


def python_files(folder: str) -> list[Path]:
    """Return the Python files of a folder, links not followed."""
    return [path for path in tracked("*.py") if path.relative_to(ROOT).parts[0] == folder]


@pytest.mark.parametrize("folder", PROCESSES)
def test_process_imports_no_other_process(folder: str) -> None:
    files = python_files(folder)
    assert files
    for path in files:
        assert imported_processes(path) <= {folder}, path


def test_shared_vocabulary_imports_nothing_heavy_and_no_process() -> None:
    for path in python_files("headrace"):
        if path.name != "grammar.py":  # which only those import who need it
            assert not {name.split(".")[0] for name in imports(path)} & HEAVY, path
        assert not imported_processes(path), path


def test_only_some_executors_import_torch() -> None:
    files = [path for path in tracked("*.py") if not is_test(path) and path.parent.name != "cuda"]
    users = {path.name for path in files if uses(path, "torch")}
    assert users == {
        "classifier.py",
        "encoder_executor.py",
        "torch_attention.py",
        "torch_collectives.py",
        "torch_executor.py",
        "torch_profile.py",
        "tower.py",
        "transformers_check.py",
        "transformers_executor.py",
        "transformers_hook.py",
        "transformers_model.py",
        "transformers_shard.py",
    }


def test_only_kernels_import_triton() -> None:
    users = [path for path in tracked("*.py") if uses(path, "triton") and not is_test(path)]
    assert {path.parent.name for path in users} == {"cuda"}


def test_a_worker_that_needs_no_torch_loads_none() -> None:
    code = "import headrace.engine_proc.worker.main, sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not {"torch", "transformers"} & set(result.stdout.split())


def test_a_vision_worker_loads_torch_when_it_has_begun() -> None:
    code = "import headrace.engine_proc.vision.main, sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not {"torch", "transformers"} & set(result.stdout.split())


def test_who_may_never_see_a_grammar_does_not_load_llguidance() -> None:
    for main in ("engine_proc.main", "tokenizer_proc.main", "tokenizer_proc.service"):
        code = f"import headrace.{main}, sys; print(*sys.modules)"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert "llguidance" not in result.stdout.split()


def uses(path: Path, package: str) -> bool:
    """Whether a file imports a package or a part of it."""
    return package in {name.split(".")[0] for name in imports(path)}


def is_test(path: Path) -> bool:
    """Whether a file belongs to the tests or benchmarks."""
    return path.relative_to(ROOT).parts[0] in ("tests", "bench")


def reachable(module: str, seen: set[str]) -> set[str]:
    """Return all modules of headrace that importing `module` loads."""
    if module in seen:
        return seen
    relative = module.removeprefix("headrace").removeprefix(".").replace(".", "/")
    candidates = [ROOT / f"{relative}.py", ROOT / f"headrace/{relative}.py"]
    path = next((p for p in candidates if p.is_file()), None)
    if path is None:
        return seen
    seen.add(module)
    for name in imports(path):
        if name.startswith("headrace."):
            reachable(name, seen)
    return seen


def test_nothing_the_frontend_imports_has_a_json_codec() -> None:
    modules = reachable("headrace.frontend.main", set())
    assert {"headrace.frontend.app", "headrace.messages", "headrace.sockets"} <= modules
    for path in python_files("frontend"):
        assert not imports(path) & JSON_CODECS, path
        assert "json." not in path.read_text(), path
    for module in modules:
        relative = module.removeprefix("headrace.").replace(".", "/")
        path = next(
            p for p in (ROOT / f"{relative}.py", ROOT / f"headrace/{relative}.py") if p.is_file()
        )
        assert not {name.split(".")[0] for name in imports(path)} & (HEAVY | {"numpy"}), path


def test_the_environment_says_nothing_but_keys_and_where_things_are() -> None:
    read = set()
    for path in tracked("*.py"):
        if path.relative_to(ROOT).parts[0] in (*PROCESSES, "headrace"):
            names = re.findall(r"environ(?:ment)?(?:\.get\(|\[)\W*(\w+)", path.read_text())
            read.update(names)
            assert "getenv" not in path.read_text(), path
    keys = {"VARIABLE", "ADMIN_VARIABLE", "OPENAI_API_KEY"}
    assert read == keys | {"HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "INTERPRET", "VISIBLE"}


def test_nothing_is_pickled() -> None:
    forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}
    for path in tracked("*.py"):
        assert not {name.split(".")[0] for name in imports(path)} & forbidden, path
        if path != Path(__file__):
            assert not re.search(r"send_pyobj|recv_pyobj|torch\.load\(", path.read_text()), path


def test_files_and_functions_stay_short() -> None:
    for path in [*tracked("*.py"), *tracked("csrc/*")]:
        assert len(path.read_text().splitlines()) <= MAX_LINES, path
    for path in tracked("*.py"):
        for node in parsed(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= MAX_FUNCTION_LINES, f"{path}: {node.name} has {length} lines"


def test_every_file_has_a_noun() -> None:
    for path in tracked("*"):
        assert path.stem not in NAMELESS, path


def test_every_process_says_what_it_takes_and_gives() -> None:
    mains = [path for path in tracked("*/main.py") if not is_test(path)]
    assert len(mains) == 7
    for path in mains:
        lines = path.read_text().splitlines()
        assert re.match(r'"""\w+ process: .*[.;]$', lines[0]), path
        assert re.match(r"In: .+\.  Out: .+\.\"\"\"$", lines[1]), path


def test_links_and_package_map_agree() -> None:
    setup = (ROOT / "setup.py").read_text()
    for folder in PROCESSES:
        link = ROOT / "headrace" / folder
        assert link.is_symlink()
        assert link.readlink() == Path("..") / folder
        assert f'"headrace.{folder}"' in setup
    assert (ROOT / "src/headrace").readlink() == Path("../headrace")


def test_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == __version__


def test_readme_lists_every_flag_with_its_default() -> None:
    readme = (ROOT / "README.md").read_text()
    for field in dataclasses.fields(ServerConfig):
        if field.name == "model":
            continue
        row = re.search(rf"^\| `{flag_name(field.name)}` \| (.*?) \|", readme, re.MULTILINE)
        assert row, field.name
        assert row[1] == str(field.default) or field.default in (None, ()), field.name
