"""Pages are copied to the host and back bit by bit, and a step sees no difference."""

import dataclasses
import os
from array import array

import numpy as np
import pytest
import torch
from random_decoders import NUM_PAGES, SPEC, batch, random_weights

from headrace.engine_proc.shm.cache_memory import CacheMemory
from headrace.engine_proc.shm.page_memory import PageMemory, whole
from headrace.engine_proc.worker.cuda.attention.tile_schedule import Tiling
from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.cuda.cuda_page_copier import (
    LAUNCHED_RECORDS,
    CudaPageCopier,
    HostEvent,
)
from headrace.engine_proc.worker.cuda.pinned_memory import PORTABLE, pin
from headrace.engine_proc.worker.execution.cache_split import CacheSplit
from headrace.engine_proc.worker.execution.executor import Batch
from headrace.engine_proc.worker.models.specs.decoder_spec import LayerSpec
from headrace.errors import ConfigError
from headrace.ipc.worker_messages import CacheLayout, CopyPages, PagesCopied, RecordKind

NUM_HOST_PAGES = 40
NO_STATES = torch.empty(0, 0)
SIZES = {"num_heads": 2, "num_kv_heads": 1, "hidden_size": 32, "intermediate_size": 40}
TINY = dataclasses.replace(SPEC, layers=(LayerSpec(), LayerSpec()), **SIZES)


def host_memory(num_bytes: int, device: torch.device) -> tuple[int, CacheMemory]:
    """Return memory of the host, pinned where there is a GPU, and its descriptor."""
    fd = os.memfd_create("host pages")
    memory = CacheMemory(fd, num_bytes, bytes(16))
    if device.type == "cuda":
        pin(memory.address, num_bytes, torch.cuda.cudart().cudaHostRegister)
    return fd, memory


def pair(places: list[int], host_places: list[int]) -> tuple[bytes, bytes]:
    return array("i", places).tobytes(), array("i", host_places).tobytes()


def copy(to_host: bool, pages: list[int], host_pages: list[int]) -> CopyPages:
    return CopyPages(to_host, *pair(pages, host_pages))


def finish(copier: CudaPageCopier) -> list[PagesCopied]:
    answers: list[PagesCopied] = []
    while copier.settle(answers.append):
        pass
    return answers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_page_is_a_record_of_the_store_and_comes_back(
    dtype: torch.dtype, device: torch.device
) -> None:
    bits = torch.arange(2 * 2 * 5 * 4 * 1 * 8 * dtype.itemsize, dtype=torch.int64) % 251
    kv = bits.to(torch.uint8).view(dtype).view(2, 2, 5, 4, 1, 8).to(device)
    before = kv.view(torch.uint8).clone()
    page_bytes = kv.nbytes // 5
    fd, memory = host_memory(3 * page_bytes, device)
    copier = CudaPageCopier([kv], NO_STATES, memory, CacheSplit(3, 0))
    copier.begin(copy(True, [4, 1], [0, 2]))
    assert len(finish(copier)) == 1
    records = PageMemory([fd], CacheLayout(3, 0, [page_bytes], [0]))
    into = memoryview(bytearray(page_bytes))
    assert records.read(RecordKind.PAGES, 2, into)
    page = before.view(2, 2, 5, -1)[:, :, 1]
    assert bytes(into) == page.cpu().numpy().tobytes()
    kv.view(torch.uint8).zero_()
    records.write(RecordKind.PAGES, 1, into)
    copier.begin(copy(False, [3, 4], [1, 0]))
    finish(copier)
    now = kv.view(torch.uint8).view(2, 2, 5, -1)
    assert torch.equal(now[:, :, 3], page)
    assert torch.equal(now[:, :, 4], before.view(2, 2, 5, -1)[:, :, 4])
    assert not now[:, :, :3].any()
    os.close(fd)


def test_a_state_is_a_record_of_the_store_and_comes_back(device: torch.device) -> None:
    states = torch.arange(4 * 7, dtype=torch.float32, device=device).view(4, 7)
    before = states.clone()
    kv = torch.zeros(1, 2, 2, 1, 1, 1, device=device)
    fd, memory = host_memory(whole(8) + 3 * 28, device)
    copier = CudaPageCopier([kv], states, memory, CacheSplit(1, 3))
    copier.begin(CopyPages(True, b"", b"", *pair([3, 0], [1, 2])))
    assert len(finish(copier)) == 1
    records = PageMemory([fd], CacheLayout(1, 3, [8], [28]))
    into = memoryview(bytearray(28))
    assert records.read(RecordKind.STATES, 1, into)
    assert bytes(into) == before[3].cpu().numpy().tobytes()
    states.fill_(float("nan"))
    records.write(RecordKind.STATES, 0, into)
    copier.begin(CopyPages(False, *pair([1], [0]), *pair([2, 1], [0, 2])))
    assert len(finish(copier)) == 1
    assert torch.equal(states[1:3], before[[0, 3]]) and states[[0, 3]].isnan().all()
    os.close(fd)


class LateEvent(HostEvent):
    """An event of a device that is never done before it is told to be."""

    is_done = False

    def query(self) -> bool:
        return LateEvent.is_done


def test_copies_are_launched_a_few_at_a_time_in_order() -> None:
    kv = (
        torch.arange(2 * LAUNCHED_RECORDS).float().view(1, 1, -1, 1, 1, 1).expand(1, 2, -1, 1, 1, 1)
    )
    fd, memory = host_memory(8 * 2 * LAUNCHED_RECORDS, torch.device("cpu"))
    split = CacheSplit(2 * LAUNCHED_RECORDS, 0)
    copier = CudaPageCopier([kv.contiguous()], NO_STATES, memory, split, LateEvent)
    places = list(range(LAUNCHED_RECORDS + 1))
    copier.begin(copy(True, places, places))
    copier.begin(copy(True, [LAUNCHED_RECORDS + 1], [LAUNCHED_RECORDS + 1]))
    on_host = np.memmap(f"/proc/self/fd/{fd}", np.float32, "r", shape=(2 * LAUNCHED_RECORDS, 2))
    answers: list[PagesCopied] = []
    assert copier.settle(answers.append)
    assert on_host[:, 0].tolist() == [*range(LAUNCHED_RECORDS), *[0] * LAUNCHED_RECORDS]
    assert copier.settle(answers.append) and not answers
    assert on_host[LAUNCHED_RECORDS : LAUNCHED_RECORDS + 2, 1].tolist() == [16, 17]
    LateEvent.is_done = True
    assert not copier.settle(answers.append)
    assert len(answers) == 2 and all(answer.seconds >= 0 for answer in answers)
    os.close(fd)


def make(device: torch.device) -> CudaExecutor:
    return CudaExecutor(
        TINY,
        random_weights(TINY),
        num_pages=NUM_PAGES,
        page_tokens=16,
        device=device,
        dtype=torch.float32,
        tiling=Tiling(rows=16, keys=16, split_keys=16, enough_programs=6),
    )


def test_a_step_on_copied_pages_has_the_bits_of_one_without(device: torch.device) -> None:
    ours, plain = make(device), make(device)
    prompt, rest = batch([(0, 0, 32)]), batch([(0, 32, 37)])
    for executor in (ours, plain):
        executor.forward(prompt)
    fd, memory = host_memory(NUM_HOST_PAGES * ours.page_bytes, device)
    copier = CudaPageCopier(ours.kv.groups, ours.states, memory, CacheSplit(NUM_HOST_PAGES, 0))
    full = prompt.page_table[0, :2].tolist()
    copier.begin(copy(True, full, [7, 3]))
    finish(copier)
    for group in ours.kv.groups:
        group.fill_(float("nan"))  # as after a death
    others = [page for page in range(NUM_PAGES) if page not in prompt.page_table[0]][:2]
    copier.begin(copy(False, others, [7, 3]))
    finish(copier)
    table = rest.page_table.copy()
    table[0, :2] = others
    moved: Batch = dataclasses.replace(rest, page_table=table)
    np.testing.assert_array_equal(ours.forward(moved), plain.forward(rest))
    os.close(fd)


def test_pages_of_heads_of_two_sizes_are_one_record(device: torch.device) -> None:
    small = torch.arange(2 * 2 * 3 * 4).float().view(2, 2, 3, 4, 1, 1).to(device)
    large = 1000 + torch.arange(2 * 3 * 4 * 10).float().view(1, 2, 3, 4, 2, 5).to(device)
    before = [group.clone() for group in (small, large)]
    page_bytes = 4 * (16 + 80)
    fd, memory = host_memory(2 * page_bytes, device)
    copier = CudaPageCopier([small, large], NO_STATES, memory, CacheSplit(2, 0))
    copier.begin(copy(True, [2], [1]))
    finish(copier)
    on_host = np.memmap(f"/proc/self/fd/{fd}", np.float32, "r", shape=(2, 96))[1]
    assert on_host[:16].tolist() == before[0][:, :, 2].flatten().tolist()
    assert on_host[16:].tolist() == before[1][:, :, 2].flatten().tolist()
    for group in (small, large):
        group.zero_()
    copier.begin(copy(False, [0], [1]))
    finish(copier)
    for group, old in zip((small, large), before, strict=True):
        assert torch.equal(group[:, :, 0], old[:, :, 2]) and not group[:, :, 1:].any()
    os.close(fd)


def test_memory_that_is_not_pinned_is_one_clear_line() -> None:
    asked: list[tuple[int, ...]] = []

    def register(*arguments: int) -> int:
        asked.append(arguments)
        return len(asked) - 1

    pin(4096, 100, register)
    assert asked == [(4096, 100, PORTABLE)]
    with pytest.raises(ConfigError, match="--kv-store-bytes: the driver pins no 100 bytes"):
        pin(4096, 100, register)
