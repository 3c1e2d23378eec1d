"""Measure what adapters (LoRA) cost: 32 sequences over 8 adapters beside the same without any.

Method: 32 requests of 64 tokens come at once and generate 64 tokens each. Those of one system name
        the model, those of the other 8 adapters of random factors, of all linear layers, by turns.
        The rounds of both alternate on one server, which has loaded all adapters before. A speed is
        that of all tokens after the last first token. A load is the time of a POST to
        /v1/load_lora_adapter for a file that is new to the server, one token computed included.
Run:    python bench/lora.py --rounds 5
"""

import json
import time
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import safetensors.numpy

from support import models
from support.report import Quantity, Report, parser
from support.servers import Server, StartFailed, headrace
from support.streams import Stream, complete

NUM_REQUESTS, PROMPT_TOKENS, NUM_TOKENS = 32, 64, 64
NUM_ADAPTERS, RANK = 8, 16
BASE, ADAPTERS = "the model", f"{NUM_ADAPTERS} adapters"
SHAPES = {  # of SmolLM2-135M
    "self_attn.q_proj": (576, 576),
    "self_attn.k_proj": (192, 576),
    "self_attn.v_proj": (192, 576),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (1536, 576),
    "mlp.up_proj": (1536, 576),
    "mlp.down_proj": (576, 1536),
}
NUM_LAYERS = 30


def write_adapter(folder: Path, seed: int) -> Path:
    """Save an adapter of random factors in fp16, 9.8 MB."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(NUM_LAYERS):
        for module, (rows, columns) in SHAPES.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            for part, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
                numbers = rng.standard_normal(shape, np.float32) * np.float32(0.01)
                tensors[f"{name}.lora_{part}.weight"] = numbers.astype(np.float16)
    folder.mkdir(parents=True)
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}
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
    tokens = sum(stream.num_tokens - stream.num_first for stream in streams)
    return tokens / (max(s.last for s in streams) - max(s.first for s in streams))


def main() -> None:
    """Run."""
    args = parser(__doc__, rounds=5).parse_args()
    report = Report("lora", args)
    ids = models.text_tokens(PROMPT_TOKENS * NUM_REQUESTS)
    prompts = [ids[i::NUM_REQUESTS] for i in range(NUM_REQUESTS)]
    speed = Quantity(
        f"{NUM_REQUESTS} sequences", "tokens/s", {ADAPTERS: [], BASE: []}, higher_is_better=True
    )
    loads = Quantity("a load of 9.8 MB", "ms", {ADAPTERS: []})
    with TemporaryDirectory() as root:
        folders = [write_adapter(Path(root) / f"a{i}", i) for i in range(NUM_ADAPTERS)]
        flags = ("--enable-lora", "--lora-dir", root, "--allow-runtime-lora-updating")
        try:
            server = headrace(str(models.model_folder()), *flags)
        except StartFailed as error:
            report.miss(f"adapters: {error.reason}")
            return report.finish()
        with server:
            names = [folder.name for folder in folders]
            for count in range(args.rounds + 1):  # the first warms up
                for system, chosen in ((BASE, []), (ADAPTERS, names)):
                    streams = complete(server.url, prompts, NUM_TOKENS, models=chosen)
                    if count:
                        speed.samples[system].append(rate(streams))
            for count in range(args.rounds):
                new = write_adapter(Path(root) / f"new-{count}", NUM_ADAPTERS + count)
                loads.samples[ADAPTERS].append(load_ms(server, new.name, new))
        report.add(speed)
        report.add(loads)
    report.finish()


if __name__ == "__main__":
    main()
