"""The packages and the C++ extension. All metadata is in pyproject.toml.

`src` holds one link, to `headrace`, which holds links to the other folders. An editable install
puts `src` on the path of Python, mypy, pyright and editors; `tests` and `bench` stay off it.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from itertools import chain
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# `headrace.csrc` has no Python: NVRTC compiles its files on the machine that has the GPUs.
PACKAGES = ["headrace", "headrace.csrc"] + [
    os.path.dirname(path).replace("/", ".")
    for path in sorted(glob("headrace/*/**/__init__.py", recursive=True))
]

core = Extension(
    "headrace._core",
    sources=sorted(glob("csrc/**/*.cpp", recursive=True)),
    depends=sorted(glob("csrc/**/*.h", recursive=True)),
    include_dirs=["csrc"],
    extra_compile_args=["-std=c++17", "-O3", "-fno-math-errno", "-Wall", "-Wextra", "-pthread"],
    extra_link_args=["-pthread"],
    language="c++",
)


class BuildAtOnce(build_ext):
    """Compiles as many files at once as there are processors."""

    def build_extension(self, ext: Extension) -> None:
        compile_some = self.compiler.compile

        def compile_all(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                objects = pool.map(lambda source: compile_some([source], **options), sources)
                return list(chain.from_iterable(objects))

        self.compiler.compile = compile_all
        super().build_extension(ext)


setup(
    packages=PACKAGES,
    package_dir={"": "src"},
    include_package_data=False,  # only what is listed here
    package_data={
        "headrace": ["py.typed"],
        "headrace.frontend": ["ui/dist/*", "ui/dist/*/*"],
        "headrace.engine_proc.mock": ["profiles/*.json"],
        "headrace.csrc": ["collectives/*.cuh"],
    },
    ext_modules=[core],
    cmdclass={"build_ext": BuildAtOnce},
)
