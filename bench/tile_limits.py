"""Measure how near to bf16's rate prompts of quantized weights can come on Intel's tiles.

Method: loops on one core do what a unit of 16 rows, 16 outputs and 256 columns takes, part by
        part. Nothing is decoded. Q4_K multiplies two bytes of activations by two of weights, int8
        one by one. Operands are random and in the nearest cache, but for the parts "far": rows and
        sums of a prompt of 256, from L2. The loop of bf16 does what its kernel does, with rows from
        L2, but unpacks no weights. All loops take turns in every round, then the core's prompts of
        512 tokens do. A share is the time of bf16 over that of the loop, or of the prompt. The loop
        "few" has 8 rows beside 4-bit weights out of memory. It reads, decodes and multiplies them.
        It stores the sums of each group, which are not added up. Its share is the time of reading
        over its own: what reading alone or with decoding takes, whichever is faster.
Run:    python bench/tile_limits.py --rounds 5
"""

import argparse
import ctypes
import time

from core_roofline import CONTEXT, PREFILL_TOKENS, Core, spec_of
from cpu_step import prefill_batch
from support.arithmetic import kernels_of
from support.compiled import compiled
from support.report import Quantity, Report, parser

FORMATS = ("BF16", "Q4_K", "INT8")
# Each with the parts before it: the integers of a group or a unit as floats, under its scale, are
# its totals.
PARTS = {
    "q4_k": ("products", "loads", "stores", "totals", "minima", "far"),
    "int8": ("loads", "stores", "totals", "far"),
}
BASE = "bf16_all"
READ = ("few_read", "few_decoded")
FEW = ("few_multiplied", "few_stored")
TRIAL_S = 0.1


class Loop:
    """One loop of tile_units.c."""

    def __init__(self, name: str) -> None:
        self._run = compiled("tile_units")[name]
        self._run.restype = ctypes.c_int64
        self._run.argtypes = (ctypes.c_int64,)
        self._run(1)  # fills what the loops read
        self._rounds = max(1, int(TRIAL_S / self._seconds(1)))

    def unit_ns(self) -> float:
        """Measure what a unit takes."""
        start = time.perf_counter()
        num_units: int = self._run(self._rounds)
        return (time.perf_counter() - start) / num_units * 1e9

    def _seconds(self, rounds: int) -> float:
        start = time.perf_counter()
        self._run(rounds)
        return time.perf_counter() - start


def measure(loops: dict[str, Loop], cores: dict[str, Core], rounds: int) -> list[Quantity]:
    """Let all take turns; return times and shares."""
    times: dict[str, list[float]] = {name: [] for name in loops}
    prompts: dict[str, list[float]] = {name: [] for name in cores}
    batch = prefill_batch(PREFILL_TOKENS)
    for number in range(rounds + 1):
        own = {name: loop.unit_ns() for name, loop in loops.items()}
        seconds = {name: core.seconds(batch, 1) for name, core in cores.items()}
        if number:  # the first round is thrown away
            for name, value in own.items():
                times[name].append(value)
            for name, value in seconds.items():
                prompts[name].append(value)
        print(f"round {number} of {rounds} done", flush=True)
    quantities = [Quantity(f"{name} unit", "ns", {"loop": all}) for name, all in times.items()]
    reading = [min(own) for own in zip(*(times[name] for name in READ), strict=True)]
    for name, all in times.items():
        if name in FEW:
            quantities.append(share(f"{name} beside reading", "loop", reading, all))
        elif name not in (BASE, *READ):
            quantities.append(share(f"{name} beside bf16", "loop", times[BASE], all))
    for name, all in prompts.items():
        rates = {"headrace": [PREFILL_TOKENS / own for own in all]}
        quantities.append(Quantity(f"{name} prompt", "tok/s", rates, True))
        if name != "BF16":
            quantities.append(share(f"{name} prompt beside bf16", "headrace", prompts["BF16"], all))
    return quantities


def share(name: str, system: str, base: list[float], own: list[float]) -> Quantity:
    """Return the share of a rate, by times of the same rounds."""
    shares = [a / b for a, b in zip(base, own, strict=True)]
    return Quantity(name, "share", {system: shares}, True)


def main() -> None:
    """Parse options, measure, print the table and a line of JSON."""
    options = parser(__doc__, rounds=5)
    options.add_argument("--shape", default="qwen2.5-1.5b")
    options.add_argument("--threads", type=int, default=1)
    args = options.parse_args()
    report = Report("tile_limits", args)
    report.versions["kernels"] = kernels_of("best")
    if "amx" not in report.versions["kernels"]:
        print("left out: this processor has no tiles, or the system lets no process use them")
        return
    names = [
        BASE,
        *READ,
        *FEW,
        *(f"{name}_{part}" for name, parts in PARTS.items() for part in parts),
    ]
    room = argparse.Namespace(sequences=[1], context=[CONTEXT], threads=args.threads, isa="best")
    cores = {format: Core(format, spec_of(args.shape), room) for format in FORMATS}
    for quantity in measure({name: Loop(name) for name in names}, cores, args.rounds):
        report.add(quantity)
    report.finish()


if __name__ == "__main__":
    main()
