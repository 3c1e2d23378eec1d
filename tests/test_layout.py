"""The rules of the tree: imports, names, lengths and words."""

import dataclasses
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from source_tree import ROOT, python_file, text_of, tracked

from headrace import __version__
from headrace.config.config import ServerConfig
from headrace.config.flag_values import flag_name

PROCESSES = ["frontend", "tokenizer_proc", "engine_proc", "detokenizer_proc"]
# Packages of headrace, each with those that it may import. Modules of `headrace/` itself are leaves
# that all may import. A folder of a process may import itself and SHARED, and its own packages as
# in WITHIN.
PACKAGES = {
    "system": "",
    "model": "",
    "board": "",
    "ipc": "board model",
    "storage": "",
    "config": "board model response_bodies",
    "runtime": "board config ipc system",
    "supervision": "board config ipc runtime system",
    "metrics": "board config ipc system",
    "launch": "board config runtime supervision system",
    "client": "launch",
    "response_bodies": "",
    "offline": "board client config ipc launch model response_bodies system",
    "testing": "config launch",
    "cli": "board client config ipc model runtime storage supervision system",
    "bench": "config offline runtime",
}
SHARED = {"system", "model", "board", "ipc", "config", "runtime", "response_bodies", "storage"}
FURTHER = {  # than SHARED, of processes
    "engine_proc.child_processes": {"supervision"},
    "engine_proc.placement": {"supervision"},
    "engine_proc.stages": {"supervision"},
    "tokenizer_proc": {"metrics"},
    "tokenizer_proc.scripts": {"testing"},  # the vocabulary of scripts
    "detokenizer_proc": {"metrics"},
}
WITHIN = {
    "frontend": {"": "admission http", "http": "", "admission": "http"},
    "tokenizer_proc": {
        "": "requests encoding grammar images jobs openapi ring scripts",
        "requests": "",
        "jobs": "",
        "encoding": "requests jobs",
        "grammar": "requests jobs",
        "images": "requests encoding jobs",
        "openapi": "requests ring",
        "ring": "jobs",
        "scripts": "jobs",
        "fetcher": "",
    },
    "detokenizer_proc": {
        "": "parsers renderers",
        "parsers": "",
        "renderers": "parsers",
        "telemetry": "",
    },
    "engine_proc": {
        "": "gateway images kv_cache request_io scheduling sequence shm step child_processes",
        "shm": "",
        "collectives": "",
        "sequence": "shm",
        "images": "sequence",
        "drafts": "sequence",
        "kv_cache": "sequence",
        "scheduling": "drafts images kv_cache sequence",
        "step": "sequence shm",
        "request_io": "kv_cache scheduling sequence",
        "child_processes": "collectives images kv_cache scheduling sequence shm",
        "kv_store": "kv_cache shm worker.execution",
        "mock": "gateway request_io",
        "remote": "request_io",
        "gateway": "request_io",
        "placement": "",
        "stages": "child_processes remote shm",
        "vision": "shm worker worker.checkpoints worker.cuda worker.execution worker.models "
        "worker.models.specs",
        "worker": "collectives shm worker.adapters worker.checkpoints worker.cuda "
        "worker.cuda.kernels worker.execution worker.hf worker.models worker.models.specs "
        "worker.parallel worker.stages",
        "worker.checkpoints": "",
        "worker.models.specs": "",
        "worker.models.families": "worker.models.specs",
        "worker.models": "worker.checkpoints worker.models.families worker.models.specs",
        "worker.parallel": "collectives worker.checkpoints worker.models worker.models.specs",
        "worker.adapters": "worker.checkpoints worker.models worker.models.specs worker.parallel",
        "worker.execution": "collectives shm worker.adapters worker.checkpoints worker.models "
        "worker.models.specs worker.parallel",
        "worker.stages": "shm worker.checkpoints worker.execution worker.models "
        "worker.models.specs worker.parallel",
        "worker.reference": "worker.checkpoints worker.execution worker.models worker.models.specs",
        "worker.hf": "collectives worker.adapters worker.checkpoints worker.execution "
        "worker.parallel worker.reference",
        "worker.cuda": "collectives shm step worker.adapters worker.checkpoints "
        "worker.cuda.attention worker.cuda.kernels worker.cuda.matrices worker.cuda.mixers "
        "worker.cuda.mixtures worker.cuda.residuals worker.execution worker.models "
        "worker.models.specs worker.parallel",
        "worker.cuda.attention": "worker.cuda.kernels worker.models.specs worker.reference",
        "worker.cuda.kernels": "worker.models worker.models.specs worker.reference",
        "worker.cuda.mixers": "worker.cuda.kernels worker.cuda.matrices worker.models.specs "
        "worker.reference",
        "worker.cuda.mixtures": "worker.cuda.kernels worker.models.specs worker.reference",
        "worker.cuda.residuals": "worker.cuda.kernels worker.cuda.matrices worker.models.specs",
        "worker.cuda.matrices": "worker.adapters worker.checkpoints worker.cuda.kernels "
        "worker.cuda.mixtures worker.models worker.models.specs",
    },
}
GPU_PACKAGES = (
    *("cuda", "cuda.attention", "cuda.kernels", "cuda.matrices", "cuda.mixers"),
    *("cuda.mixtures", "cuda.residuals"),
)
MAX_MODULES = 20
MAX_TEST_NAME = 60
MAX_COLUMNS = 100
# Words for people, where the component is to be named. Spelled so that this file has none.
PERSONS = re.compile(
    r"(?<![a-z])(wh(?:o|oever|om)|(?:no|some|any|every)body|(?:some|any|every)one"
    r"|(?:s|)h(?:e)|h(?:er|ers|im|is))(?![a-z])",
    re.IGNORECASE,
)
MAX_LINES = 600
MAX_FUNCTION_LINES = 80
HEAVY = {"torch", "transformers", "tokenizers", "fastokens", "llguidance"}
JSON_CODECS = {"json", "orjson", "msgspec.json"}
NAMELESS = {"utils", "util", "helpers", "common", "misc", "manager"}


def imports(path: Path) -> set[str]:
    """Return the dotted names a file imports, however the import is written."""
    return python_file(path).imports


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


@functools.cache
def package_of(path: Path) -> str:
    """Return the package of headrace that a file is in, as "engine_proc.worker"; "" is headrace."""
    folder = str(path.relative_to(ROOT).parent).replace("/", ".")
    return folder.removeprefix("headrace").removeprefix(".")


@functools.cache
def packages() -> set[str]:
    """Return all packages of headrace."""
    return {package_of(path) for path in sources()}


@functools.cache
def imported_packages(path: Path) -> set[str]:
    """Return the packages of headrace that a file imports; not its own, nor headrace itself."""
    found = set()
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "headrace":
            prefixes = (".".join(parts[1:end]) for end in range(len(parts), 0, -1))
            found.add(next((prefix for prefix in prefixes if prefix in packages()), ""))
    return found - {"", package_of(path)}


@functools.cache
def sources() -> list[Path]:
    """Return the Python files of the product."""
    return [path for folder in ("headrace", *PROCESSES) for path in python_files(folder)]


def test_packages_import_only_those_below_them() -> None:
    for path in sources():
        package = package_of(path)
        process, _, inner = package.partition(".")
        if process in WITHIN:
            within = {f"{process}.{name}" for name in WITHIN[process][inner].split()}
            allowed = SHARED | within | FURTHER.get(package, set())
        elif package:
            allowed = set(PACKAGES[package].split())
        else:
            allowed = {"cli", "client", "offline", "launch"}  # of `__init__` and the like
        assert imported_packages(path) <= allowed, path


def test_packages_import_in_no_cycle() -> None:
    edges: dict[str, set[str]] = {}
    for path in sources():
        if package_of(path):
            edges.setdefault(package_of(path), set()).update(imported_packages(path))
    while ends := {package for package in edges if not edges[package] & edges.keys()}:
        for package in ends:
            del edges[package]
    assert not edges


def test_packages_have_few_modules() -> None:
    modules = [package_of(path) for path in sources() if path.stem != "__init__"]
    assert {package for package in modules if modules.count(package) > MAX_MODULES} == set()


@pytest.mark.parametrize("folder", PROCESSES)
def test_process_imports_no_other_process(folder: str) -> None:
    files = python_files(folder)
    assert files
    for path in files:
        assert imported_processes(path) <= {folder}, path


def test_shared_vocabulary_imports_nothing_heavy_and_no_process() -> None:
    for path in python_files("headrace"):
        if path.name != "grammar_compiler.py":  # imported only where grammars are compiled
            assert not {name.split(".")[0] for name in imports(path)} & HEAVY, path
        assert not imported_processes(path), path


def test_only_some_executors_import_torch() -> None:
    worker = "engine_proc.worker"
    whole = {f"{worker}.{name}" for name in (*GPU_PACKAGES, "hf")}
    users = {(package_of(path), path.stem) for path in sources() if uses(path, "torch")}
    assert {user for user in users if user[0] not in whole} == {
        (worker, "torch_profile"),
        (f"{worker}.parallel", "tensor_parallel_group"),
        (f"{worker}.parallel", "torch_collectives"),
        (f"{worker}.reference", "torch_attention"),
        (f"{worker}.reference", "torch_delta_net"),
        (f"{worker}.reference", "torch_gemma"),
        (f"{worker}.reference", "torch_executor"),
        (f"{worker}.reference", "torch_mamba"),
        (f"{worker}.reference", "torch_mamba2"),
        (f"{worker}.reference", "torch_mixture"),
        ("engine_proc.vision", "tower"),
    }


def test_only_kernels_import_triton() -> None:
    users = [path for path in tracked("*.py") if uses(path, "triton") and not is_test(path)]
    assert {package_of(path) for path in users} == {
        f"engine_proc.worker.{name}" for name in GPU_PACKAGES
    }


def test_a_worker_that_needs_no_torch_loads_none() -> None:
    code = "import headrace.engine_proc.worker.main, sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not {"torch", "transformers"} & set(result.stdout.split())


@pytest.mark.parametrize("process", ["tokenizer_proc", "detokenizer_proc", "engine_proc"])
def test_a_process_without_an_event_loop_loads_none(process: str) -> None:
    code = f"import headrace.{process}.main, sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not {"asyncio", "ssl", "email", "importlib.metadata"} & set(result.stdout.split())


def test_a_vision_worker_loads_torch_when_it_has_begun() -> None:
    code = "import headrace.engine_proc.vision.main, sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not {"torch", "transformers"} & set(result.stdout.split())


def test_processes_without_grammars_load_no_llguidance() -> None:
    for main in ("engine_proc.main", "tokenizer_proc.main", "tokenizer_proc.service"):
        code = f"import headrace.{main}, sys; print(*sys.modules)"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert "llguidance" not in result.stdout.split()


def test_the_supervisor_loads_links_for_its_copies() -> None:
    code = "import headrace.supervision.supervisor, sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "headrace.ipc.sockets" in result.stdout.split()
    assert not {"numpy", "tokenizers", "asyncio"} & set(result.stdout.split())


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
    assert {"headrace.frontend.app", "headrace.ipc.messages", "headrace.ipc.sockets"} <= modules
    for path in python_files("frontend"):
        assert not imports(path) & JSON_CODECS, path
        assert "json." not in text_of(path), path
    for module in modules:
        relative = module.removeprefix("headrace.").replace(".", "/")
        path = next(
            p for p in (ROOT / f"{relative}.py", ROOT / f"headrace/{relative}.py") if p.is_file()
        )
        assert not {name.split(".")[0] for name in imports(path)} & (HEAVY | {"numpy"}), path


def test_processes_write_no_json_object_by_hand() -> None:
    written = re.compile(r"""\bb(["'])\{(?!\1)\\?["']""")  # a literal of bytes that begins with one
    for folder in PROCESSES:
        assert not [path for path in python_files(folder) if written.search(text_of(path))]


def test_environment_holds_only_keys_and_locations() -> None:
    read = set()
    for path in tracked("*.py"):
        if path.relative_to(ROOT).parts[0] in (*PROCESSES, "headrace"):
            names = re.findall(r"environ(?:ment)?(?:\.get\(|\[)\W*(\w+)", text_of(path))
            read.update(names)
            assert "getenv" not in text_of(path), path
    keys = {"VARIABLE", "ADMIN_VARIABLE", "OPENAI_API_KEY"}
    keys |= {"TRACES_PROTOCOL", "PROTOCOL"}  # of OpenTelemetry's exporter
    keys |= {"P2P_DISABLE"}  # of NCCL
    keys |= {"RAY_ADDRESS"}
    assert read == keys | {"HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "INTERPRET", "VISIBLE"}


def test_nothing_is_pickled() -> None:
    forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}
    for path in tracked("*.py"):
        assert not {name.split(".")[0] for name in imports(path)} & forbidden, path
        if path != Path(__file__):
            assert not re.search(r"send_pyobj|recv_pyobj|torch\.load\(", text_of(path)), path


def test_files_and_functions_stay_short() -> None:
    for path in [*tracked("*.py"), *tracked("csrc/*")]:
        assert len(text_of(path).splitlines()) <= MAX_LINES, path
    for path in tracked("*.py"):
        for name, length in python_file(path).functions:
            assert length <= MAX_FUNCTION_LINES, f"{path}: {name} has {length} lines"


def test_no_literal_is_unpacked_where_it_stands() -> None:
    for path in sources():
        assert not python_file(path).unpacked_literals, path  # write its elements


def test_class_names_are_unique() -> None:
    names = Counter(name for path in sources() for name in python_file(path).classes)
    assert not {name for name, count in names.items() if count > 1}


def test_names_of_tests_are_short() -> None:
    for path in tracked("tests/*.py"):
        for name, _ in python_file(path).functions:
            is_long = name.startswith("test_") and len(name) > MAX_TEST_NAME
            assert not is_long, f"{path}: {name} has {len(name)} characters"


def persons_in(path: Path) -> int:
    """Return how many lines of a file have a word for a person."""
    return sum(PERSONS.search(line) is not None for line in text_of(path).splitlines())


def wide_lines_in(path: Path) -> int:
    """Return how many lines of prose are too wide: not tables, not code, not one long word."""
    count, is_code = 0, False
    for line in text_of(path).splitlines():
        is_code ^= line.startswith("```")
        is_prose = not is_code and not line.startswith(("|", "    "))
        count += is_prose and len(line) > MAX_COLUMNS and " " in line[:MAX_COLUMNS].strip()
    return count


@pytest.mark.parametrize(
    ("kind", "patterns", "count"),
    [
        ("persons", ("*.py", "*.cpp", "*.h", "*.cuh", "*.md"), persons_in),
        ("wide lines", ("*.md",), wide_lines_in),
    ],
)
def test_prose_keeps_its_rules(
    kind: str, patterns: tuple[str, ...], count: Callable[[Path], int]
) -> None:
    paths = {path for pattern in patterns for path in tracked(pattern)}
    found = {str(path.relative_to(ROOT)): count(path) for path in paths}
    wrong = {name: number for name, number in found.items() if number}
    assert not wrong, f"{kind}: reword these lines, by file"


def test_every_file_has_a_noun() -> None:
    for path in tracked("*"):
        assert path.stem not in NAMELESS, path


def test_every_process_says_what_it_takes_and_gives() -> None:
    mains = [path for folder in PROCESSES for path in python_files(folder) if path.stem == "main"]
    assert len(mains) == 12
    for path in mains:
        lines = text_of(path).splitlines()
        assert re.match(r'"""\w+ process: .*[.;]$', lines[0]), path
        assert re.match(r"In: .+\.  Out: .+\.\"\"\"$", lines[1]), path


def test_links_lead_to_the_folders_of_processes() -> None:
    for folder in PROCESSES:
        link = ROOT / "headrace" / folder
        assert link.is_symlink()
        assert link.readlink() == Path("..") / folder
    assert (ROOT / "src/headrace").readlink() == Path("../headrace")


def test_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == __version__


def test_flags_page_lists_every_flag_with_its_default() -> None:
    page = (ROOT / "docs/flags.md").read_text()
    rows = dict(re.findall(r"^\| `(--[\w-]+)` \| (.*?) \|", page, re.MULTILINE))
    fields = {flag_name(f.name): f for f in dataclasses.fields(ServerConfig) if f.name != "model"}
    assert rows.keys() == fields.keys()
    for name, field in fields.items():
        assert rows[name] == str(field.default) or field.default in (None, ()), name


def test_operations_names_only_flags_that_exist() -> None:
    known = {flag_name(field.name) for field in dataclasses.fields(ServerConfig)}
    of_replay = {"--process", "--pace"}
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", (ROOT / "docs/operations.md").read_text()))
    assert named - of_replay <= known
    assert named & known
