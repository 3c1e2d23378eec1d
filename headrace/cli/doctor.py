"""`headrace doctor [MODEL ...] [flags]`: this machine's hardware, the choices made, the problems.

It takes the flags of `headrace serve`, starts nothing, and exits with 1 where the server could not.
"""

import os
import pkgutil
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from headrace import __version__
from headrace.config.config import CPU_KV_BYTES, ServerConfig
from headrace.config.flags import configs_from_flags, server_parser
from headrace.config.model_card import read_card
from headrace.config.process_configs import ExecutionConfig, ModelCard
from headrace.config.weight_files import weight_bytes
from headrace.errors import HeadraceError, end_command
from headrace.model.gguf import GgufFile, read_metadata
from headrace.model.mmproj import projector_of
from headrace.native_core import load_core
from headrace.supervision.engine_groups import EngineGroup, check_groups
from headrace.supervision.listeners import listen
from headrace.system.all_reduce_policy import Topology, describe, disabled_by
from headrace.system.cpu_share import num_nodes
from headrace.system.gpu_topology import load_nvml, topology
from headrace.system.gpus import Gpu, load_driver, look
from headrace.system.machine import Machine, has_gpus, packages

DESCRIPTION = (
    "Report this machine's hardware, what the server would choose with these flags, and what is "
    "wrong. It starts nothing, and exits with 1 where the server could not start."
)
FEW_FILES = 1024
NOTHING = "nothing"  # runs a model
NUM_BUSY = 5  # processes that work at once: one of each kind
# Imported only when they are called, since they load the worker.
FORESEE = "headrace.engine_proc.worker.backend_selection:foresee"
SAME_KERNELS = "on CPUs, texts are equal where all machines have the same kernels"
FORESEE_STAGES = "headrace.engine_proc.worker.backend_selection:foresee_stages"
FORESEE_MEMORY = "headrace.engine_proc.worker.weight_memory:foresee_memory"
FORESEE_ARITHMETIC = "headrace.engine_proc.worker.weight_memory:foresee_arithmetic"
FORESEE_DRAFT = "headrace.engine_proc.worker.weight_memory:foresee_draft"
FORESEE_ADAPTERS = "headrace.engine_proc.worker.weight_memory:foresee_adapters"
FORESEE_SECOND_EMBEDDING = "headrace.engine_proc.worker.weight_memory:foresee_second_embedding"
FORESEE_TOWER = "headrace.engine_proc.worker.models.tower_memory:tower_memory"
WHY_IN_MODULES = "headrace.engine_proc.vision.placement:why_in_modules"


@dataclass(frozen=True)
class Finding:
    """A problem and its remedy. A `fatal` one keeps the server from starting."""

    text: str
    fatal: bool = False


def gib(num_bytes: float) -> str:
    """Return a size in human-readable form."""
    return f"{num_bytes / (1 << 30):.1f} GiB"


def mib(num_bytes: float) -> str:
    """Return a size in MiB, in human-readable form."""
    return f"{num_bytes / (1 << 20):,.1f} MiB"


def is_for_gpus(config: ServerConfig, card: ModelCard, machine: Machine) -> bool:
    """Whether weights and pages go to GPUs; by flags and machine where nothing runs the model."""
    if config.engine != "mock":
        try:
            return bool(pkgutil.resolve_name(FORESEE)(ExecutionConfig.of(config, card)).on_gpus)
        except HeadraceError:  # which another finding tells
            pass
    return config.device == "cuda" or (config.device == "auto" and bool(machine.gpus))


def kv_bytes(config: ServerConfig) -> int:
    """Return how large the KV cache will be on CPUs."""
    return CPU_KV_BYTES if config.kv_cache_memory_bytes is None else config.kv_cache_memory_bytes


def facts(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield what the machine has."""
    quota = "" if machine.quota >= machine.num_usable else f", {machine.quota:g} cores' time"
    yield (
        "processor",
        f"{machine.processor}: {machine.num_usable} of {machine.num_cores} cores{quota}",
    )
    yield "kernels", machine.isa
    yield "memory", f"{gib(machine.free_bytes)} free of {gib(machine.memory_bytes)}"
    yield "NUMA nodes", str(machine.num_numa_nodes)
    driver = f", driver {machine.driver}" if machine.driver else ""
    yield "GPUs", f"{', '.join(machine.gpus)}{driver}" if machine.gpus else "none"
    shm = "none" if machine.shm_bytes is None else f"{gib(machine.shm_bytes)} free; not needed"
    yield "/dev/shm", shm
    files = "no limit" if machine.max_files < 0 else str(machine.max_files)
    yield "open files", f"{files} for each process"
    yield "system", f"{platform.system()} {platform.release()}, Python {platform.python_version()}"


def executor_of(config: ServerConfig, card: ModelCard) -> str:
    """Return what will run a model, and why.

    Raises:
        ModelError: nothing will, as the flags are.
    """
    if config.engine == "mock":
        return f"{NOTHING}: --engine mock runs no model"
    execution = ExecutionConfig.of(config, card)
    choice = pkgutil.resolve_name(FORESEE)(execution)
    arithmetic = pkgutil.resolve_name(FORESEE_ARITHMETIC)(execution)
    told = f"{choice.executor}: {choice.why}"
    return f"{told}; multiplies {arithmetic}" if arithmetic else told


def all_reduce(
    config: ServerConfig, machine: Machine, find: Callable[[int], Topology]
) -> Iterator[tuple[str, str]]:
    """Yield the all-reduce choice for the workers of a model: `--tp` of them, or one per GPU.

    Args:
        find: returns how a number of GPUs reach each other.
    """
    num_gpus = config.tp if config.tp > 1 else len(machine.gpus)
    if config.device == "cpu" or (config.device == "auto" and num_gpus > len(machine.gpus)):
        if config.tp > 1:
            yield "all-reduce", "shared memory: the workers are on the CPU"
        return
    if not 1 < num_gpus <= len(machine.gpus):
        return
    try:
        disabled = disabled_by(config.disable_custom_all_reduce, os.environ)
        text = describe(num_gpus, find(num_gpus), disabled)
    except HeadraceError as error:
        text = f"NCCL: {error}"
    yield "all-reduce", text


def find_topology(num_gpus: int) -> Topology:
    """Return how the first GPUs reach each other, of those that workers may use.

    Raises:
        HeadraceError: there are fewer, or nothing is installed that our own kernels need.
    """
    uuids = [gpu.uuid for gpu in find_gpus()]
    if len(uuids) < num_gpus:
        raise HeadraceError(f"{len(uuids)} of {num_gpus} GPUs may be used")
    return topology(load_nvml(), uuids[:num_gpus])


def find_gpus() -> list[Gpu]:
    """Return the GPUs that the CUDA driver finds."""
    return list(look(load_driver(), load_nvml()))


def facts_of_gpus(gpus: list[Gpu]) -> Iterator[tuple[str, str]]:
    """Yield what each GPU is."""
    for gpu in gpus:
        yield (
            f"GPU {gpu.index}",
            f"{gpu.name}, {gib(gpu.free_bytes)} free of {gib(gpu.total_bytes)}, compute capability "
            f"{'.'.join(map(str, gpu.capability))}, {gpu.num_processors} processors, {gpu.pci}",
        )


def wrong_with_gpus(config: ServerConfig, gpus: list[Gpu]) -> Iterator[Finding]:
    """Yield problems of the GPUs that workers would use."""
    share = config.gpu_memory_utilization
    for gpu in gpus[: config.tp]:
        if gpu.free_bytes < share * gpu.total_bytes:
            yield Finding(
                f"GPU {gpu.index} has {gib(gpu.free_bytes)} free, and --gpu-memory-utilization "
                f"{share:g} would have {gib(share * gpu.total_bytes)}: the KV cache will be smaller"
            )


def examine_gpus(config: ServerConfig, find: Callable[[], list[Gpu]]) -> list[Finding]:
    """Print the GPUs and return their problems."""
    try:
        gpus = find()
    except HeadraceError as error:
        return [Finding(f"the GPUs cannot be asked what they are: {error}")]
    report("GPUs", facts_of_gpus(gpus))
    return list(wrong_with_gpus(config, gpus))


def kv_cache(config: ServerConfig, on_gpus: bool) -> str:
    """Return how large the KV cache will be, for people."""
    if on_gpus and config.kv_cache_memory_bytes is None:
        return f"what --gpu-memory-utilization {config.gpu_memory_utilization:g} leaves"
    return f"{gib(kv_bytes(config))} (--kv-cache-memory-bytes)"


def plan(
    config: ServerConfig, card: ModelCard, executor: str, tower: str, on_gpus: bool
) -> Iterator[tuple[str, str]]:
    """Yield what will be used for a model.

    Args:
        tower: as `tower_of` returns.
    """
    yield "name", card.name
    yield "files", f"{card.path}, {gib(weight_bytes(Path(card.path)))}"
    if card.mmproj is not None:
        yield "projector", projector(read_metadata(card.mmproj))
    if card.takes_images:
        yield "images", f"taken; the tower runs in {tower}"
    yield "runs in", executor
    if config.pp > 1 and not executor.startswith(NOTHING):
        yield "stages", stages_of(config, card)
    if config.max_loaded_models is not None:
        fitting = "as many models as memory is enough for"
        yield "loaded", f"on demand; at once {config.max_loaded_models or fitting}"
    if config.num_own_engines > 1:
        yield "replicas", f"{config.num_own_engines} engines"
    if config.num_remote_engines:
        yield "elsewhere", elsewhere(config)
    yield "context", f"{card.max_model_len} tokens, {config.max_num_seqs} sequences at once"
    if card.embeds:
        yield "kind", f"embeddings of {card.embedding_size} numbers"
    else:
        yield "KV cache", kv_cache(config, on_gpus)
        yield "chat template", template_source(card)


def stages_of(config: ServerConfig, card: ModelCard) -> str:
    """Return which layers each stage of a pipeline has, for people."""
    found: list[range] = pkgutil.resolve_name(FORESEE_STAGES)(ExecutionConfig.of(config, card))
    layers = ", ".join(f"{own.start} to {own.stop - 1}" for own in found)
    workers = f", each with {config.tp} workers" if config.tp > 1 else ""
    nodes = f", each on a machine of its own; {SAME_KERNELS}" if config.has_remote_stages else ""
    return f"{len(found)} of layers {layers}{workers}{nodes}"


def template_source(card: ModelCard) -> str:
    """Return what writes a model's chats."""
    if card.writes_harmony:
        return "harmony"
    if card.mistral_tokenizer is not None:
        return "mistral-common"
    return "from the model" if card.chat_template else "none"


def elsewhere(config: ServerConfig) -> str:
    """Return which engines are on other machines."""
    by_ray = f"{config.num_placed_engines} engines by Ray" if config.num_placed_engines else ""
    found = ", ".join(filter(None, (*config.remote_engines, by_ray)))
    return f"{found}; the server looks for them when it starts; {SAME_KERNELS}"


def projector(file: GgufFile) -> str:
    """Return what a projector file is, for people."""
    return f"{file.path}, {projector_of(file.metadata)}, {mib(weight_bytes(file.path))}"


def tower_of(config: ServerConfig, card: ModelCard, on_gpus: bool) -> str:
    """Return what runs a model's vision tower and why, and the memory that it takes on a CPU.

    Raises:
        ModelError: its files are broken.
    """
    if config.engine == "mock" or not card.takes_images:
        return "nothing"
    execution = ExecutionConfig.of(config, card)
    why = pkgutil.resolve_name(WHY_IN_MODULES)(execution)
    memory = "" if on_gpus else f", with {mib(tower_bytes(config, card)[1])} of memory"
    return (f"transformers' modules ({why})" if why else "the C++ core") + memory


def tower_bytes(config: ServerConfig, card: ModelCard) -> tuple[int, int]:
    """Return what a vision tower's weights take of the model's files, and of a CPU's memory.

    Raises:
        ModelError: its files are broken.
    """
    found: tuple[int, int] = pkgutil.resolve_name(FORESEE_TOWER)(ExecutionConfig.of(config, card))
    return found


def held_weights(config: ServerConfig, card: ModelCard) -> list[Any]:
    """Return how a GGUF file's weights are executed, by type; nothing of other models.

    Raises:
        ModelError: nothing runs them, as the flags are.
    """
    if config.engine == "mock" or config.load_format == "dummy":
        return []
    found: list[Any] = pkgutil.resolve_name(FORESEE_MEMORY)(ExecutionConfig.of(config, card))
    return found


def weights(held: list[Any]) -> Iterator[tuple[str, str]]:
    """Yield how each type of weights is executed, and what it takes."""
    for one in held:
        yield (
            one.stored,
            f"{one.num_weights} tensor{'s' * (one.num_weights > 1)} of {mib(one.stored_bytes)}, "
            f"executed {one.how}: {mib(one.held_bytes)} of memory",
        )
    yield "all", f"{mib(sum(one.held_bytes for one in held))} of memory, beside the KV cache"


def kept_beside(
    config: ServerConfig, card: ModelCard, draft: int, adapters: int, embedding: int
) -> Iterator[tuple[str, str]]:
    """Yield what is kept beside a model, and the bytes that it takes; nothing where there is none.

    Args:
        draft: bytes of what drafts tokens.
        adapters: bytes that adapters take at most.
        embedding: bytes of a tied embedding that the last stage has, too.
    """
    if draft:
        own = "its own layer" if config.speculative == "mtp" else "in 4 bits"
        drafter = card.draft_model or f"{card.path}, {own}"
        yield "draft model", f"{drafter}: {mib(draft)} of memory"
    if adapters:
        count = ExecutionConfig.of(config, card).max_loaded_loras
        rank = config.max_lora_rank
        yield "adapters", f"at most {count}, of rank {rank}: {mib(adapters)} of memory"
    if embedding:
        yield "embedding", f"in the first stage and the last: {mib(embedding)} more of memory"


def weight_memory(config: ServerConfig, card: ModelCard) -> int:
    """Return what a model's weights take: as they are executed where that is known, else stored.

    Those of a vision tower, a draft model, adapters and a second embedding count, too.
    """
    held: list[Any] = []
    stored = images = beside = 0
    with suppress(HeadraceError):  # which another finding tells, as those below
        held = held_weights(config, card)
    with suppress(HeadraceError):
        stored, images = tower_bytes(config, card)
    with suppress(HeadraceError):
        beside = sum(beside_bytes(config, card))
    stored_here = (weight_bytes(Path(card.path)) - stored) // num_machines(config)
    own = sum(one.held_bytes for one in held) or stored_here
    return own + images + beside


def num_machines(config: ServerConfig) -> int:
    """Return how many machines share a model; each has about the same part."""
    return config.pp if config.has_remote_stages else 1


def beside_bytes(config: ServerConfig, card: ModelCard) -> tuple[int, int, int]:
    """Return what a draft model, adapters, and an embedding once more take; 0 without any.

    Raises:
        HeadraceError: the draft model cannot draft for the model, or it has no stages.
    """
    if config.engine == "mock":
        return 0, 0, 0
    execution = ExecutionConfig.of(config, card)
    draft: int = pkgutil.resolve_name(FORESEE_DRAFT)(execution)
    adapters: int = pkgutil.resolve_name(FORESEE_ADAPTERS)(execution)
    embedding: int = pkgutil.resolve_name(FORESEE_SECOND_EMBEDDING)(execution)
    return draft, adapters, embedding


def wrong_with_machine(machine: Machine) -> Iterator[Finding]:
    """Yield problems of a machine, independent of the model."""
    if machine.isa == "portable":
        yield Finding("the processor has no AVX2: the kernels are slow")
    if machine.is_refused_tiles:
        yield Finding(
            "the system refuses this process the processor's tiles (AMX), as a filter of system "
            "calls may: allow arch_prctl, or prompts in bf16 take longer"
        )
    if machine.num_usable < NUM_BUSY:
        yield Finding(
            f"{NUM_BUSY} processes share {machine.num_usable} cores: they wait for each other"
        )
    if machine.quota < machine.num_usable:
        yield Finding(
            f"the container has {machine.quota:g} cores' time for {machine.num_usable} cores, and "
            "is stopped when it is used up; give it whole cores"
        )
    if machine.num_numa_nodes > 1:
        yield Finding(
            "memory is spread over several NUMA nodes; have a replica on each by "
            "--data-parallel-size auto, or stay on one: "
            "numactl --cpunodebind=0 --membind=0 headrace serve …"
        )
    if 0 <= machine.max_files < FEW_FILES:
        yield Finding(
            f"a frontend may open {machine.max_files} files, a connection each; raise `ulimit -n`"
        )


def cpu_bytes(config: ServerConfig, card: ModelCard, on_gpus: bool) -> int:
    """Return what the engines of a model take of the CPU's memory."""
    if config.engine == "mock" or on_gpus:
        return 0
    needed = weight_memory(config, card)
    needed += 0 if card.embeds else kv_bytes(config) // num_machines(config)
    return config.num_own_engines * needed


def loaded_together(sizes: Sequence[int], groups: Sequence[EngineGroup]) -> Sequence[int]:
    """Return the largest sizes of models that are loaded at once. Where memory decides, it is one.

    Args:
        sizes: of all models.
    """
    most = groups[0].config.max_loaded_models if groups else None
    return sizes if most is None else sorted(sizes, reverse=True)[: max(most, 1)]


def wrong_with_models(
    groups: Sequence[EngineGroup], sizes: Sequence[int], machine: Machine
) -> Iterator[Finding]:
    """Yield problems of serving some models together on a machine.

    Args:
        sizes: what each takes, as `cpu_bytes` returns.
    """
    try:
        check_groups(groups)
    except HeadraceError as error:
        yield Finding(str(error), fatal=True)
    needed = sum(loaded_together(sizes, groups))
    if needed > machine.free_bytes:
        has_adapters = any(group.config.enable_lora for group in groups)
        loras = " --max-cpu-loras, --max-loras," if has_adapters else ""
        yield Finding(
            f"weights and KV cache take {gib(needed)}, and {gib(machine.free_bytes)} are free; "
            f"lower{loras} --kv-cache-memory-bytes, or use --quantization or a smaller model",
            fatal=True,
        )
    for config, card in ((group.config, group.card) for group in groups):
        if config.engine != "mock" and not card.embeds and not card.takes_chats:
            which = "the model" if len(groups) == 1 else card.name
            yield Finding(f"{which} has no chat template: /v1/chat/completions will refuse")
        if card.pooling is None and "rerank" in f"{config.model} {card.path}".lower():
            yield Finding(
                f"{card.name} is called a reranker and generates: --hf-overrides with "
                "classifier_from_token makes it one, see docs/api/embeddings.md"
            )


def wrong_with_install(found: dict[str, str | None]) -> Iterator[Finding]:
    """Yield problems of the installation."""
    for name, version in found.items():
        if version is None:
            yield Finding(f"the package {name} is missing; `pip install {name}`", fatal=True)
    try:
        load_core()
    except HeadraceError as error:
        yield Finding(str(error), fatal=True)


def report(title: str, rows: Iterator[tuple[str, str]]) -> None:
    """Print a table."""
    print(f"{title}:")
    for name, value in rows:
        print(f"  {name:14} {value}")
    print()


def examine_model(config: ServerConfig, card: ModelCard, on_gpus: bool = False) -> list[Finding]:
    """Print what will be used for a model, and return why nothing can run it."""
    findings, executor, held, beside = [], NOTHING, list[Any](), (0, 0, 0)
    tower = "nothing"
    try:
        executor = executor_of(config, card)
        tower = tower_of(config, card, on_gpus)
        held = held_weights(config, card)
        beside = beside_bytes(config, card)
    except HeadraceError as error:
        findings.append(Finding(str(error), fatal=True))
    rows = plan(config, card, executor, tower, on_gpus)
    report("model", chain(rows, kept_beside(config, card, *beside)))
    if held:
        report("weights", weights(held))
    return findings


def examine_models(configs: Sequence[ServerConfig], machine: Machine) -> list[Finding]:
    """Print what will be used for each model, and return their problems."""
    findings, groups, sizes = [], [], []
    for config in configs:
        try:
            card = read_card(config)
        except HeadraceError as error:
            findings.append(Finding(str(error), fatal=True))
        else:
            groups.append(EngineGroup(config, card))
            on_gpus = is_for_gpus(config, card, machine)
            findings += examine_model(config, card, on_gpus)
            sizes.append(cpu_bytes(config, card, on_gpus))
    return [*findings, *wrong_with_models(groups, sizes, machine)]


def examine(configs: Sequence[ServerConfig], machine: Machine) -> list[Finding]:
    """Print the findings and return the problems. Flags of the server are the first model's."""
    config = configs[0]
    report("machine", chain(facts(machine), all_reduce(config, machine, find_topology)))
    findings = [*wrong_with_machine(machine)]
    if machine.gpus and config.device != "cpu":
        findings += examine_gpus(config, find_gpus)
    findings += examine_models(configs, machine)
    found = packages()
    versions = (f"{name} {version}" for name, version in found.items() if version)
    report("packages", iter([("headrace", __version__), ("its needs", ", ".join(versions))]))
    findings += wrong_with_install(found)
    try:
        listen(config).close()
    except HeadraceError as error:
        findings.append(Finding(str(error), fatal=True))
    return findings


def main(argv: list[str]) -> None:
    """Print a report; exit with 1 if the server could not start."""
    try:
        parser = server_parser("headrace doctor", DESCRIPTION)
        configs = configs_from_flags(argv, has_gpus(), parser, num_nodes())
        findings = examine(configs, Machine.look())
    except HeadraceError as error:
        end_command("headrace doctor", error)
    print("what is wrong:" if findings else "nothing is wrong")
    for finding in findings:
        print(f"  {'!' if finding.fatal else '-'} {finding.text}")
    if any(finding.fatal for finding in findings):
        sys.exit(1)
