"""Measure decoders with states or latents: decode, prompts, and how decode grows with context.

Method: layers of a model's shape with random weights in bf16, keys and values in bf16, states in
        fp32. The limit of one sequence is the bandwidth over what a token reads. It is measured
        before and after in each round, and the better one counts. A token reads weights as held,
        keys and values, and states, which are also written. A prompt
        is 512 tokens; transformers computes it in bf16, with as many threads. Both take turns, and
        the first round is thrown away. "but attention" is a step's time less that of attention over
        keys and values, which grows with the context in any decoder.
Run:    python bench/hybrids.py --shape lfm2-1.2b
"""

import os
import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np

from core_roofline import weight_bytes
from cpu_step import PAGE_TOKENS, decode_batch, prefill_batch
from headrace.engine_proc.worker.checkpoints.weights import Format
from headrace.engine_proc.worker.execution.cache_sizes import page_bytes, state_bytes
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor, KVDtype
from headrace.engine_proc.worker.execution.executor import Batch
from headrace.engine_proc.worker.execution.held_matrices import WeightDtype
from headrace.engine_proc.worker.models.lowering import lower_config
from support.bandwidth import Bandwidth
from support.random_weights import random_weights
from support.report import Quantity, Report, parser
from support.shapes import full_config

SHAPES = ("lfm2-1.2b", "qwen3.5-9b", "minicpm3-4b")
PREFILL_TOKENS = 512
CONTEXTS = (64, 32_000)
STEPS = 5  # of a round, of which the median counts
OURS, THEIRS = "headrace", "transformers"


class Decoder:
    """The core with random weights of a shape."""

    def __init__(self, shape: str, threads: int) -> None:
        self.spec = lower_config(full_config(shape))
        weights = random_weights(Format.BF16, self.spec)
        self._weight_bytes = weight_bytes(self.spec, weights, WeightDtype.PACKED)
        self.core = CpuExecutor(
            self.spec,
            weights,
            num_pages=max(CONTEXTS) // PAGE_TOKENS + 1,
            page_tokens=PAGE_TOKENS,
            num_states=2 if self.spec.state_numbers else 0,
            weight_dtype=WeightDtype.PACKED,
            kv_dtype=KVDtype.BFLOAT16,
            rounds_activations=True,
            threads=threads,
        )

    def token_bytes(self, context: int) -> int:
        """Return the bytes that a token reads and writes, behind so many."""
        keys_and_values = context * page_bytes(self.spec, 1, KVDtype.BFLOAT16)
        return self._weight_bytes + keys_and_values + 2 * state_bytes(self.spec)

    def seconds(self, batch: Batch, begins: bool, steps: int) -> tuple[float, float]:
        """Return what a step takes, in all and but attention."""
        if self.spec.state_numbers:
            state_in = np.array([-1 if begins else 0], np.int32)
            batch = replace(batch, state_in=state_in, state_out=np.array([1], np.int32))
        times, rests = [], []
        for _ in range(steps):
            self.core.step_seconds()
            start = time.perf_counter()
            self.core.logits(batch)
            taken = time.perf_counter() - start
            parts = self.core.step_seconds()
            times.append(taken)
            rests.append(taken - parts["attention"])
        return statistics.median(times), statistics.median(rests)


class Reference:
    """The same layers in transformers' modules."""

    def __init__(self, shape: str, threads: int) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.set_num_threads(threads)
        config = full_config(shape)
        made = AutoConfig.for_model(config.pop("model_type"), **config)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            made, dtype=torch.bfloat16
        )
        self._model = model.eval()
        self._torch = torch

    def prompt_s(self) -> float:
        """Return what a prompt takes."""
        ids = self._torch.arange(1, PREFILL_TOKENS + 1)[None]
        with self._torch.inference_mode():
            start = time.perf_counter()
            self._model(ids, use_cache=False, logits_to_keep=1)
            return time.perf_counter() - start


def measure(shape: str, args: Any, memory: Bandwidth) -> list[Quantity]:
    """Return all quantities of a shape."""
    decoder, reference = Decoder(shape, args.threads), Reference(shape, args.threads)
    rows: dict[tuple[str, str], dict[str, list[float]]] = {}

    def add(what: str, unit: str, value: float, system: str = OURS) -> None:
        rows.setdefault((what, unit), {}).setdefault(system, []).append(value)

    for number in range(args.rounds + 1):
        plain = memory.bytes_per_s()
        prompt_s, _ = decoder.seconds(prefill_batch(PREFILL_TOKENS), True, 1)
        their_s = reference.prompt_s()
        steps = {c: decoder.seconds(decode_batch(1, c), False, STEPS) for c in CONTEXTS}
        plain = max(plain, memory.bytes_per_s())
        if number:
            for context, (taken, _) in steps.items():
                add(f"decode behind {context}", "tok/s", 1 / taken)
                share = decoder.token_bytes(context) / plain / taken
                add(f"decode behind {context}, of the bandwidth", "share", share)
            add("prefill", "tok/s", PREFILL_TOKENS / prompt_s)
            add("prefill", "tok/s", PREFILL_TOKENS / their_s, THEIRS)
            short, long = (steps[context][1] for context in CONTEXTS)
            add(f"a step behind {CONTEXTS[1]} but attention", "of the short one", long / short)
    return [
        Quantity(f"{shape} {what}", unit, systems, higher_is_better=not unit.startswith("of"))
        for (what, unit), systems in rows.items()
    ]


def main() -> None:
    """Run."""
    options = parser(__doc__, rounds=5)
    options.add_argument("--shape", nargs="+", default=SHAPES, choices=SHAPES)
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = options.parse_args()
    report = Report("hybrids", args)
    memory = Bandwidth(args.threads)
    for shape in args.shape:
        for quantity in measure(shape, args, memory):
            report.add(quantity)
        print(f"{shape} done", flush=True)
    report.finish()


if __name__ == "__main__":
    main()
