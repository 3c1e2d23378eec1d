"""The packages and the C++ extension. All other metadata is in pyproject.toml.

`src` holds one link, to `headrace`, which holds links to the other folders. An editable install
puts `src` on the path of Python, mypy, pyright and editors; `tests` and `bench` stay off it.
"""

import os
import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from email.parser import HeaderParser
from glob import glob
from itertools import chain
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent

# `headrace.csrc` has no Python: NVRTC compiles its files on the machine that has the GPUs.
PACKAGES = ["headrace", "headrace.csrc"] + [
    os.path.dirname(path).removeprefix("src/").replace("/", ".")
    for path in sorted(glob("src/headrace/*/**/__init__.py", recursive=True))
]

core = Extension(
    "headrace._core",
    sources=sorted(glob("csrc/**/*.cpp", recursive=True)),
    depends=sorted(glob("csrc/**/*.h", recursive=True)),
    include_dirs=["csrc"],
    define_macros=[("Py_LIMITED_API", "0x030b0000")],
    py_limited_api=True,
    extra_compile_args=[
        *("-std=c++17", "-O3", "-g0", "-fno-math-errno", "-Wall", "-Wextra", "-pthread"),
        *("-include", "older_glibc.h"),
    ],
    extra_link_args=["-pthread"],
    language="c++",
)


# The files that take longest to compile, in order, and whether a processor with these flags runs
# their kernels.
KERNELS: dict[str, Callable[[set[str]], bool]] = {
    "kernels_portable.cpp": lambda flags: not {"avx2", "fma"} <= flags,
    "kernels_avx2.cpp": lambda flags: "avx2" in flags and "avx512_vnni" not in flags,
    "kernels_avx_vnni.cpp": lambda flags: "avx_vnni" in flags and "avx512_vnni" not in flags,
    "kernels_avx512.cpp": lambda flags: "avx512bw" in flags,
    "few_rows.cpp": lambda flags: "avx512vbmi" in flags,
    "attention_amx.cpp": lambda flags: "amx_bf16" in flags,
    "kernels_amx.cpp": lambda flags: "amx_bf16" in flags,
    "kernels_amx_int16.cpp": lambda flags: "amx_int8" in flags,
    "kernels_neon.cpp": lambda flags: not flags,  # these are arm64's, and empty elsewhere
    "kernels_neon_dot.cpp": lambda flags: not flags,
    "kernels_neon_i8mm.cpp": lambda flags: not flags,
    "kernels_neon_bf16.cpp": lambda flags: not flags,
}
SLOWEST = [*KERNELS]
OWN_OPTIONS = re.compile(r"^#pragma GCC (target|optimize)", re.M)


class BuildAtOnce(build_ext):
    """Compiles as many files at once as there are processors, and small files as one.

    An editable install stays on this machine. Kernels that only other processors choose are still
    correct there, but hardly optimized, which saves a third of the time.
    """

    def build_extension(self, ext: Extension) -> None:
        compile_some = self.compiler.compile
        flags = processor_flags() if self.editable_mode else set()

        def runs_here(source: str) -> bool:
            chosen_by = KERNELS.get(os.path.basename(source))
            return not flags or chosen_by is None or chosen_by(flags)

        def by_time(source: str) -> tuple[bool, int]:
            name = os.path.basename(source)
            return not runs_here(source), SLOWEST.index(name) if name in KERNELS else len(KERNELS)

        def compile_one(source: str, extra_postargs: list[str], **options: Any) -> list[str]:
            level = [] if runs_here(source) else ["-Og"]
            return compile_some([source], extra_postargs=extra_postargs + level, **options)

        def compile_all(sources: list[str], **options: Any) -> list[str]:
            slowest_first = sorted(self.merged(sources), key=by_time)
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                objects = pool.map(lambda source: compile_one(source, **options), slowest_first)
                return list(chain.from_iterable(objects))

        self.compiler.compile = compile_all
        for other in glob(
            "src/headrace/_core.cpython-*.so"
        ):  # of one Python; it would be loaded first
            os.remove(other)
        super().build_extension(ext)

    def merged(self, sources: list[str]) -> list[str]:
        """Return the files that have options of their own, and one that includes all others.

        The standard library's headers take half of the time of a small file.
        """
        alone = [
            source
            for source in sources
            if os.path.basename(source) in KERNELS or OWN_OPTIONS.search(Path(source).read_text())
        ]
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        others = [os.path.relpath(source, "csrc") for source in sources if source not in alone]
        (folder / "merged.cpp").write_text("".join(f'#include "{name}"\n' for name in others))
        return [*alone, str(folder / "merged.cpp")]


def processor_flags() -> set[str]:
    """Return the instruction sets of an x86 processor; elsewhere none."""
    try:
        found = re.search(r"^flags\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        return set()
    return set(found[1].split()) if found else set()


def git(*args: str) -> str:
    """Return what git says of this folder; "" where it says nothing or is not there."""
    try:
        told = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return told.stdout.strip() if told.returncode == 0 else ""


def version() -> str:
    """Return the version: `__version__` at its tag, a development version of it at other commits.

    An sdist has it in PKG-INFO. A folder without git has `__version__`.
    """
    if (ROOT / "PKG-INFO").exists():
        return HeaderParser().parsestr((ROOT / "PKG-INFO").read_text())["Version"]
    found = re.search(
        r'^__version__ = "(.*)"', (ROOT / "src/headrace/__init__.py").read_text(), re.M
    )
    assert found is not None
    release = found[1]
    commit = git("rev-parse", "--short", "HEAD") if (ROOT / ".git").exists() else ""
    if not commit or f"v{release}" in git("tag", "--points-at", "HEAD").split():
        return release
    return f"{release}.dev{git('rev-list', '--count', 'HEAD')}+g{commit}"


setup(
    version=version(),
    packages=PACKAGES,
    package_dir={"": "src"},
    include_package_data=False,  # only what is listed here
    package_data={
        "headrace": ["py.typed"],
        "headrace.model": ["templates/*.jinja"],
        "headrace.frontend": ["ui/dist/*", "ui/dist/*/*"],
        "headrace.engine_proc.mock": ["profiles/*.json"],
        "headrace.csrc": ["collectives/*.cuh"],
    },
    ext_modules=[core],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    cmdclass={"build_ext": BuildAtOnce},
)
