"""Where each folder installs to, and the C++ extension. All metadata is in pyproject.toml."""

from glob import glob

from setuptools import Extension, setup

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
)
