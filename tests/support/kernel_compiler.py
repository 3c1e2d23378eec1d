"""Compiles for a GPU what code launches with Triton. No GPU is needed, and nothing runs.

Tensors may be on the CPU or, where nothing reads them, on torch's meta device.
"""

import hashlib
import math
import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import mangle_type
from triton.tools.tensor_descriptor import TensorDescriptor

OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
WARPS = re.compile(r"nvidia_mma<.*warpsPerCTA = \[\d+, (\d+)\]")
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")
BRANCH = re.compile(r"(?:@!?U?P\d+ )?BRA\b.* (0x[0-9a-f]+)")
HOPPER_BYTES, HOPPER_REGISTERS, HOPPER_WARPS = 228 << 10, 1 << 16, 64  # of a processor
OWN_BYTES = 1 << 10  # of shared memory, that CUDA has of each program
PREDICATE = re.compile(r"^@!?U?P\w+ ")
QUEUE = re.compile(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<((?:\d+x){3})b?f(8|16)")
QUEUE_END = re.compile(r"ttg\.local_dealloc (%\w+) ")
USAGE = re.compile(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")


class Usage(NamedTuple):
    """What a kernel takes of a processor."""

    shared: int  # bytes of a program
    registers: int  # of a thread
    stack: int  # bytes of a thread in memory: what registers had no room for


class Loop(NamedTuple):
    """A program's innermost loop with products, once around."""

    instructions: int
    barriers: int  # of all warps, and waits for copies by TMA
    copies: int  # instructions that ask for copies to shared memory, of a thread
    loads: int  # those that load into registers


class Variant(NamedTuple):
    """A kernel as Triton specializes it, and its source."""

    name: str
    source: ASTSource
    options: dict[str, Any]
    values: dict[str, Any]


class CompiledLaunches:
    """The variants of kernels that were launched.

    Args:
        take: is given each new variant.
    """

    def __init__(self, take: Callable[[Variant], object]) -> None:
        self.names: set[str] = set()
        self._take = take

    def stand_in(self) -> Any:
        """Return what takes the place of `JITFunction.run`."""

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
            self.launch(kernel, *args, **named)

        return run

    def launch(self, kernel: Any, *args: Any, **named: Any) -> None:
        """Note what would be launched, as Triton specializes it: a 1 is a constant."""
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        values = dict(zip(kernel.arg_names, args, strict=False)) | named
        signature, constants, attributes = {}, {}, {}
        marks: list[str] = []  # of what a name has beside constants
        for place, parameter in enumerate(kernel.params):
            name, value = parameter.name, values[parameter.name]
            is_special = not parameter.do_not_specialize
            if parameter.is_constexpr or (is_special and isinstance(value, int) and value == 1):
                signature[name] = "constexpr"
                constants[(place,)] = value
                marks.append(f"{name}={value}")
                continue
            signature[name] = mangle_type(value)
            if isinstance(value, TensorDescriptor):
                continue
            if isinstance(value, torch.Tensor):
                marks += [] if signature[name] in marks else [signature[name]]
                if value.device.type == "cpu" and not value.is_floating_point():
                    value.zero_()  # it may be an output that is an index later on
            number = value.data_ptr() if isinstance(value, torch.Tensor) else value
            if is_special and isinstance(number, int) and number % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
            elif is_special and isinstance(number, int):
                marks.append(f"{name} is odd")
        marks += [f"{name}={value}" for name, value in options.items() if name != OPTIONS[-1]]
        variant = f"{kernel.__name__} {' '.join(marks)}"
        if variant not in self.names:
            self.names.add(variant)
            source = ASTSource(kernel, signature, constants, attributes)
            self._take(Variant(variant, source, options, values))


def compile_variant(variant: Variant, arch: int) -> Any:
    """Return what Triton makes of a variant for an architecture, as 90."""
    target = GPUTarget("cuda", arch, 32)
    return triton.compile(variant.source, target=target, options=variant.options)


def source_hash(variant: Variant, arch: int) -> str:
    """Return a hash of what Triton reads of a variant's source: comments change nothing in it."""
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    options = backend.parse_options(dict(variant.options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options), backend.get_module_map()
    module = variant.source.make_ir(target, options, *functions, context)
    return hashlib.sha256(module.str_nodebug().encode()).hexdigest()[:8]


def is_product(variant: Variant) -> bool:
    """Whether a variant multiplies rows with a matrix on tensor cores."""
    kernel, x = variant.name.split()[0], variant.values.get("x")
    x = x.base if isinstance(x, TensorDescriptor) else x
    is_named = "linear" in kernel or kernel == "expert_kernel"
    return is_named and x is not None and x.dtype != torch.float32


def has_only_wgmma(compiled: Any) -> bool:
    """Whether tensor cores of a Hopper are asked in one way: others may have other bits."""
    ptx = compiled.asm["ptx"]
    return "wgmma.mma_async" in ptx and "mma.sync" not in ptx


def has_rows_of_one_warp(compiled: Any) -> bool:
    """Whether a warp has all numbers of its rows of products: sums over them have one order."""
    return set(WARPS.findall(compiled.asm["ttgir"])) == {"1"}


def usage_of(compiled: Any) -> Usage:
    """Return what a compiled variant takes."""
    (usage,) = usages(compiled.asm["cubin"]).values()
    return Usage(compiled.metadata.shared, usage.registers, usage.stack)


def product_loops(cubin: bytes, has_waits: bool = False) -> list[list[str]]:
    """Return the instructions of each innermost loop that has products.

    Args:
        has_waits: some wait elsewhere, and come back by a jump that no loop ends with.
    """
    lines = [(int(at, 16), text) for at, text in INSTRUCTION.findall(dumped(cubin, "-sass"))]
    branches = [(match, at) for at, text in lines if (match := BRANCH.match(text))]
    loops = [
        range(int(match[1], 16), at)
        for match, at in branches
        if int(match[1], 16) < at and not (has_waits and match[0].startswith("BRA"))
    ]
    found = []
    for loop in loops:
        body = [text for at, text in lines if at in loop]
        is_innermost = not any(other != loop and other.start in loop for other in loops)
        if is_innermost and any("MMA" in text for text in body):
            found.append(body)
    return found


def stack_accesses(cubin: bytes) -> int:
    """Return how many instructions of innermost loops with products read or write the stack."""
    bodies = product_loops(cubin)
    assert bodies
    return sum(("LDL" in text) + ("STL" in text) for body in bodies for text in body)


def shortest_loop(cubin: bytes) -> Loop | None:
    """Return the shortest loop with products: the one without masks, where there are two.

    None is that there is none: all of it is unrolled.
    """
    body = min(product_loops(cubin, has_waits=True), key=len, default=None)
    if body is None:
        return None

    def count(*names: str) -> int:
        return sum(any(name in f" {text}" for name in names) for text in body)

    return Loop(
        len(body), count("BAR.SYNC", "SYNCS.PHASECHK"), count("LDGSTS", "UTMALDG"), count(" LDG.")
    )


def memory_instructions(cubin: bytes, kernel: str) -> list[str]:
    """Return what a kernel of a program does with memory and with barriers, in order."""
    _, _, body = dumped(cubin, "-sass").partition(f"Function : {kernel}\n")
    texts = [
        PREDICATE.sub("", text) for _, text in INSTRUCTION.findall(body.split("Function : ")[0])
    ]
    names = [text.split()[0] for text in texts]
    return [name for name in names if name.startswith(("LD", "ST", "ATOM", "BAR"))]


def bytes_in_flight(compiled: Any) -> int:
    """Return what a program has asked for while it multiplies: of each queue all places but one.

    Of loops that come one after the other, it is that which has more.
    """
    most, known = 0, dict[str, int]()
    for line in compiled.asm["ttgir"].splitlines():
        if queue := QUEUE.search(line):
            name, sizes, bits = queue.groups()
            num_places, *rest = map(int, sizes.rstrip("x").split("x"))
            known[name] = (num_places - 1) * math.prod(rest) * int(bits) // 8
        elif end := QUEUE_END.search(line):
            known.pop(end[1], None)
        most = max(most, sum(known.values()))
    return most


def usages(cubin: bytes) -> dict[str, Usage]:
    """Return what each kernel of a program takes, memory that is sized at launches aside."""
    found = USAGE.findall(dumped(cubin, "-res-usage"))
    return {name: Usage(int(shared), int(regs), int(stack)) for name, regs, stack, shared in found}


def programs_at_once(usage: Usage, num_warps: int) -> int:
    """Return how many programs a processor of a Hopper has at once."""
    registers = -(-usage.registers // 8) * 8 * 32 * num_warps
    by_memory = HOPPER_BYTES // (usage.shared + OWN_BYTES)
    return min(by_memory, HOPPER_REGISTERS // registers, HOPPER_WARPS // num_warps)


@lru_cache(maxsize=2)  # one kernel after the other is asked for several times
def dumped(cubin: bytes, what: str) -> str:
    """Return what cuobjdump says of a program."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
