"""Where each folder installs to, and the C++ extension. All metadata is in pyproject.toml."""

import os
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from itertools import chain
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

PROCESSES = ["frontend", "tokenizer_proc", "engine_proc", "detokenizer_proc", "fetcher_proc"]

package_dir = {"headrace": "headrace"}
package_dir |= {f"headrace.{folder}": folder for folder in PROCESSES}
package_dir["headrace.engine_proc.worker"] = "engine_proc/worker"
package_dir["headrace.engine_proc.vision"] = "engine_proc/vision"
package_dir["headrace.engine_proc.worker.cuda"] = "engine_proc/worker/cuda"
package_dir["headrace.detokenizer_proc.parsers"] = "detokenizer_proc/parsers"
package_dir["headrace.bench"] = "headrace/bench"
package_dir["headrace.csrc"] = "csrc"  # what NVRTC compiles on the machine that has the GPUs

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
    packages=list(package_dir),
    package_dir=package_dir,
    package_data={
        "headrace": ["py.typed"],
        "headrace.engine_proc": ["mock_profiles/*.json"],
        "headrace.csrc": ["*.cuh"],
    },
    exclude_package_data={"headrace.csrc": ["*.cpp", "*.h", "*/*"]},
    ext_modules=[core],
    cmdclass={"build_ext": BuildAtOnce},
)
