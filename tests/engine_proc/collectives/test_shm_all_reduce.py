"""Collectives through shared memory give every rank the same bits, and end whatever happens."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import (
    DEADLINE_S,
    Array,
    as_processes,
    as_threads,
    ordered_sum,
    same_bits,
)
from servers import wait_until

from headrace.engine_proc.collectives.collectives import CollectiveOutcome
from headrace.engine_proc.collectives.shm_all_reduce import (
    WATCHER,
    CollectiveFailed,
    ShmAllReduce,
)
from headrace.errors import HeadraceError

COUNT = int(os.environ.get("COLLECTIVES", "300"))  # random ones; `make soak` does 100,000
SMALL_HALF = 16384  # bytes: sums of more than that take several chunks
# Around the last number of a block of 64, of a half, of a sum that is not shared out.
SIZES = [0, 1, 2, 63, 64, 65, 127, 2047, 2048, 4096, 4097, 5461, 5462, 8193, 20_001, 100_003]
RANKS = [1, 2, 3, 4, 8]
# +-0, subnormals, the least and largest normals, infinities, NaNs with a payload and a sign
SPECIAL = [0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x3F800001, 0x7F7FFFFF, 0x7F800000, 0x7F800001]
SPECIAL += [0x7FC12345, 0x33800000, 0x38800000, 0x38000001, 0x477FE000, 0x477FF000, 0x47800000]


@pytest.fixture
def fd() -> Iterator[int]:
    """Two ranks' group."""
    made = ShmAllReduce.create(2)
    yield made
    os.close(made)


def isas() -> list[str]:
    """Return the instruction sets that this processor has."""
    flags = Path("/proc/cpuinfo").read_text()
    wanted = {"portable": "", "avx2": " avx2 ", "avx512": " avx512bw "}
    return [isa for isa, flag in wanted.items() if flag in flags]


def summed(terms: list[Array], half_bytes: int = 0, isa: str = "best") -> list[Array]:
    """Return the sum as each rank has it."""

    def body(group: ShmAllReduce) -> Array:
        x = terms[group.rank].copy()
        group.all_reduce(x)
        return x

    return as_threads(len(terms), body, half_bytes, isa)


def failures(num_ranks: int, body: dict[int, str], count: int = 8) -> list[CollectiveFailed]:
    """Let each rank call what `body` says; return how it failed, by rank."""
    x = {"float32": np.ones(count, np.float32), "float16": np.ones(count, np.float16)}
    x["larger"] = np.ones(count + 1, np.float32)

    def fail(group: ShmAllReduce) -> CollectiveFailed:
        call = body[group.rank]
        with pytest.raises(CollectiveFailed) as failure:
            if call == "gather":
                group.all_gather(x["float32"], np.ones((num_ranks, count), np.float32))
            elif call.startswith("root"):
                group.broadcast(x["float32"], int(call[-1]))
            else:
                group.all_reduce(x[call].copy())
        with pytest.raises(CollectiveFailed):
            group.check()
        return failure.value

    return as_threads(num_ranks, fail)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_sum_has_the_bits_of_numpys_on_every_rank(num_ranks: int, dtype: str) -> None:
    rng = np.random.default_rng(num_ranks)
    rows = [rng.standard_normal((num_ranks, n)).astype(dtype) for n in SIZES]

    def body(group: ShmAllReduce) -> list[Array]:
        sums = [row[group.rank].copy() for row in rows]
        for x in sums:
            group.all_reduce(x)
        return sums

    wanted = [ordered_sum(list(row)) for row in rows]
    for sums in as_threads(num_ranks, body, SMALL_HALF):
        for x, right in zip(sums, wanted, strict=True):
            assert same_bits(x, right), x.shape


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_sum_in_bfloat16_has_the_bits_of_torchs(num_ranks: int) -> None:
    terms = torch.randn(num_ranks, 30_001, generator=torch.Generator().manual_seed(0))
    terms = terms.to(torch.bfloat16)

    def body(group: ShmAllReduce) -> torch.Tensor:
        x = terms[group.rank].clone()
        group.all_reduce(x)
        return x

    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    for x in as_threads(num_ranks, body, SMALL_HALF):
        assert torch.equal(x.view(torch.int16), total.to(torch.bfloat16).view(torch.int16))


def test_forty_mebibytes_and_an_odd_number_more() -> None:
    terms = np.random.default_rng(0).standard_normal((2, (40 << 18) + 7), dtype=np.float32)
    for x in summed(list(terms)):
        assert same_bits(x, ordered_sum(list(terms)))


@pytest.mark.parametrize("isa", isas())
def test_special_numbers_sum_alike_on_every_instruction_set(isa: str) -> None:
    bits = np.array(SPECIAL + [x | 1 << 31 for x in SPECIAL], np.uint32)
    left, right = np.repeat(bits, len(bits)), np.tile(bits, len(bits))
    single = [left.view(np.float32), right.view(np.float32)]
    rng = np.random.default_rng(0)
    every = np.arange(1 << 16, dtype=np.uint16)
    half = [every.view(np.float16), rng.permutation(every).view(np.float16)]
    noise = list(rng.integers(0, 1 << 32, (3, 5001), dtype=np.uint32).view(np.float32))
    for terms in (single, half, noise):
        for x in summed(terms, SMALL_HALF, isa):
            assert same_bits(x, ordered_sum(terms))


@pytest.mark.parametrize("isa", isas())
def test_special_bfloat16_sum_alike_on_every_instruction_set(isa: str) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    shuffled = every[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))]
    terms = [every, shuffled]

    def body(group: ShmAllReduce) -> Array:
        x = terms[group.rank].clone()
        group.all_reduce(x)
        return x.view(torch.int16).numpy()

    total = (every.float() + shuffled.float()).to(torch.bfloat16)
    right = torch.where(total.isnan(), 0x7FC0, total.view(torch.int16)).to(torch.int16).numpy()
    for x in as_threads(2, body, SMALL_HALF, isa):
        assert same_bits(x, right)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_arrays_need_not_be_aligned(num_ranks: int) -> None:
    terms = np.random.default_rng(0).standard_normal((num_ranks, 9001), dtype=np.float32)

    def body(group: ShmAllReduce) -> Array:
        buffer = np.zeros(4 * 9001 + 64, np.uint8)
        at = 4 * group.rank + 4
        x = buffer[at : at + 4 * 9001].view(np.float32)
        x[:] = terms[group.rank]
        group.all_reduce(x)
        assert not buffer[:at].any() and not buffer[at + 4 * 9001 :].any()
        return x

    for x in as_threads(num_ranks, body, SMALL_HALF):
        assert same_bits(x, ordered_sum(list(terms)))


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("count", [0, 1, 4096, 10_007])
def test_gather_brings_every_ranks_part(num_ranks: int, count: int) -> None:
    parts = np.random.default_rng(0).integers(0, 1000, (num_ranks, count))

    def body(group: ShmAllReduce) -> tuple[Array, Array]:
        out, in_place = np.zeros_like(parts), np.zeros_like(parts)
        in_place[group.rank] = parts[group.rank]
        group.all_gather(parts[group.rank].copy(), out)
        group.all_gather(in_place[group.rank], in_place)
        return out, in_place

    for out, in_place in as_threads(num_ranks, body, SMALL_HALF):
        assert same_bits(out, parts)
        assert same_bits(in_place, parts)


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("count", [0, 1, 10_007])
def test_a_broadcast_brings_the_roots(root: int, count: int) -> None:
    parts = np.random.default_rng(0).integers(0, 1000, (3, count))

    def body(group: ShmAllReduce) -> Array:
        x = parts[group.rank].copy()
        group.broadcast(x, root)
        return x

    for x in as_threads(3, body, SMALL_HALF):
        assert same_bits(x, parts[root])


def test_what_cannot_be_added_is_refused(fd: int) -> None:
    group = ShmAllReduce(fd, 0, 2)
    with pytest.raises(TypeError, match="float32, float16, bfloat16; not int64"):
        group.all_reduce(np.ones(3, np.int64))
    with pytest.raises(ValueError, match="contiguous arrays"):
        group.all_reduce(np.ones((4, 4), np.float32)[:, 1])
    with pytest.raises(ValueError, match="contiguous tensors"):
        group.all_reduce(torch.ones(4, 4)[:, 1])
    with pytest.raises(ValueError, match="out has 12 bytes, not 2 times 12"):
        group.all_gather(np.ones(3, np.float32), np.ones(3, np.float32))
    with pytest.raises(ValueError, match="root 2"):
        group.broadcast(np.ones(3), 2)
    group.check()
    group.close()


@pytest.mark.parametrize("core", [None, 0], ids=["all cores", "one core"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_random_collectives_of_processes(num_ranks: int, core: int | None) -> None:
    if core is not None and core not in os.sched_getaffinity(0):
        pytest.skip("core 0 is not ours")
    count = COUNT * 2 // num_ranks
    with as_processes(num_ranks, "random_collectives", count, core) as (ranks, _):
        for rank in ranks:
            _, errors = rank.communicate(timeout=DEADLINE_S + count / 20)
            assert rank.returncode == 0, errors


def test_a_killed_rank_is_reported_by_all_others() -> None:
    with as_processes(4, "endless_sums", 3000) as (ranks, watcher):
        for rank in ranks:
            assert line_of(rank) == "first sum\n"
        ranks[2].kill()
        for number in (0, 1, 3):
            output, errors = ranks[number].communicate(timeout=DEADLINE_S)
            assert output == "PEER_DIED 2\n", errors
        with pytest.raises(CollectiveFailed, match="rank 2 died"):
            watcher.check()


def test_a_process_that_is_no_rank_ends_all_waits() -> None:
    with as_processes(3, "one_late_sum", 1) as (ranks, watcher):
        for rank in ranks:
            assert line_of(rank) == "ready\n"
        watcher.abort(CollectiveOutcome.PEER_DIED, 1)
        for number in (0, 2, 1):  # the last had not begun to wait
            _, errors = ranks[number].communicate("go on\n", timeout=DEADLINE_S)
            assert "CollectiveFailed: rank 1 died" in errors


def test_a_stopped_rank_is_waited_for() -> None:
    with as_processes(2, "one_late_sum", 1) as (ranks, watcher):
        for rank in ranks:
            assert line_of(rank) == "ready\n"
        ranks[1].send_signal(signal.SIGSTOP)
        wait_until(lambda: status(ranks[1].pid, "State").startswith("T"), "not stopped")
        slept = int(status(ranks[0].pid, "voluntary_ctxt_switches"))
        # It sleeps for 50 ms at a time, and looks whether the other lives after each.
        wait_until(
            lambda: int(status(ranks[0].pid, "voluntary_ctxt_switches")) > slept + 5, "no look"
        )
        watcher.check()
        ranks[1].send_signal(signal.SIGCONT)
        for number in (1, 0):
            output, errors = ranks[number].communicate("go on\n", timeout=DEADLINE_S)
            assert output == "sum\n", errors


def line_of(rank: subprocess.Popen[str]) -> str:
    """Return the next line that a rank prints."""
    assert rank.stdout is not None
    return rank.stdout.readline()


def status(pid: int, field: str) -> str:
    """Return a field of a process's status."""
    found = re.search(rf"^{field}:\s*(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    fd = ShmAllReduce.create(2)
    first, second = ShmAllReduce(fd, 0, 2), ShmAllReduce(fd, 1, 2)
    second.close()
    with pytest.raises(CollectiveFailed) as failure:
        first.broadcast(np.ones(1))
    assert (failure.value.outcome, failure.value.rank) == (CollectiveOutcome.PEER_DIED, 1)
    first.close()
    os.close(fd)


def test_exit_after_the_last_collective_breaks_nothing() -> None:
    fd = ShmAllReduce.create(2)
    x = np.ones(8, np.float32)

    def join_late() -> None:
        group = ShmAllReduce(fd, 1, 2)
        group.all_reduce(x)
        group.close()

    late = threading.Thread(target=join_late)
    first = ShmAllReduce(fd, 0, 2)
    late.start()
    first.all_reduce(np.ones(8, np.float32))
    first.close()
    late.join(DEADLINE_S)
    assert (x == 2).all()
    os.close(fd)


@pytest.mark.parametrize(
    ("first", "second", "texts"),
    [
        ("float32", "larger", ("all_reduce of 8 float32", "all_reduce of 9 float32")),
        ("float32", "float16", ("all_reduce of 8 float32", "all_reduce of 8 float16")),
        ("gather", "float32", ("all_gather of 32 bytes", "all_reduce of 8 float32")),
        ("root 0", "root 1", ("of 32 bytes from rank 0", "of 32 bytes from rank 1")),
    ],
)
def test_a_mismatch_is_an_error_of_both(first: str, second: str, texts: tuple[str, str]) -> None:
    errors = failures(2, {0: first, 1: second})
    for rank, error in enumerate(errors):
        assert (error.outcome, error.rank) == (CollectiveOutcome.MISMATCH, 1 - rank)
        theirs, own = texts[1 - rank], texts[rank]
        assert re.fullmatch(rf"rank {1 - rank} called .*{theirs}, rank {rank} .*{own}", str(error))


def test_all_others_hear_of_a_mismatch() -> None:
    errors = failures(3, {0: "float32", 1: "larger", 2: "float32"})
    assert {error.outcome for error in errors} == {CollectiveOutcome.MISMATCH}
    assert errors[1].rank in (0, 2)
    for error in errors:
        assert "rank 1 all_reduce of 9" in str(error) or "rank 1 called all_reduce of 9" in str(
            error
        )


def test_rank_that_gives_up_names_its_peer() -> None:
    def body(group: ShmAllReduce) -> str:
        if group.rank == 1:
            group.abort()
        with pytest.raises(CollectiveFailed) as failure:
            group.broadcast(np.ones(1))
        return str(failure.value)

    assert as_threads(3, body) == ["rank 1 failed"] * 3


def test_group_is_joined_once_by_each_of_its_ranks(fd: int) -> None:
    group = ShmAllReduce(fd, 0, 2)
    with pytest.raises(HeadraceError, match="busy"):
        ShmAllReduce(fd, 0, 2)
    for rank, num_ranks in ((2, 2), (-2, 2), (1, 3)):
        with pytest.raises(HeadraceError, match="Invalid"):
            ShmAllReduce(fd, rank, num_ranks)
    for num_ranks in (0, 17):
        with pytest.raises(HeadraceError, match="Invalid"):
            ShmAllReduce.create(num_ranks)
    group.close()


def test_what_is_no_group_is_refused() -> None:
    fd = os.memfd_create("other")
    for num_bytes in (0, 100, 1 << 20):
        os.ftruncate(fd, num_bytes)
        with pytest.raises(HeadraceError, match="Invalid"):
            ShmAllReduce(fd, 0, 2)
    os.close(fd)


def test_nothing_is_left_of_a_hundred_groups() -> None:
    # A memfd lasts as long as a descriptor or a mapping of it.
    def left() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count("headrace-all-reduce")

    names = set(os.listdir("/dev/shm"))

    before = left()
    for _ in range(100):
        fd = ShmAllReduce.create(2)
        groups = [ShmAllReduce(fd, rank, 2) for rank in (0, 1, WATCHER)]
        os.close(fd)
        for group in groups:
            group.close()
    assert all(now <= then for now, then in zip(left(), before, strict=True))
    new = set(os.listdir("/dev/shm")) - names
    assert not [name for name in new if name.startswith("headrace-all-reduce")]


FULL = """
import os, sys
from headrace.engine_proc.collectives.shm_all_reduce import ShmAllReduce
fd = ShmAllReduce.create(2)
disk = os.open(sys.argv[1] + "/group", os.O_RDWR | os.O_CREAT)
os.ftruncate(disk, os.fstat(fd).st_size)
os.pwrite(disk, os.pread(fd, 4096, 0), 0)
ShmAllReduce(disk, 0, 2)
"""


def test_full_memory_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=64k headrace-test {tmp_path}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("this user may not mount")
    run = f'{mount} && exec "$0" -c "$1" {tmp_path}'
    result = subprocess.run(
        ["unshare", "-rm", "sh", "-c", run, sys.executable, FULL],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert result.returncode == 1
    assert "no memory for the all-reduce of 2 workers" in result.stderr
    assert "No space left on device" in result.stderr


def test_a_limit_of_file_sizes_is_an_error_and_not_a_crash() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)); "
        "from headrace.engine_proc.collectives.shm_all_reduce import ShmAllReduce; "
        "ShmAllReduce.create(2)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert result.returncode == 1
    assert "no memory for the all-reduce of 2 workers" in result.stderr


def test_capturing_is_nothing_to_a_cpu(fd: int) -> None:
    group = ShmAllReduce(fd, 0, 2)
    with group.capture():
        group.check()
    group.close()


def test_waits_are_counted() -> None:
    def body(group: ShmAllReduce) -> dict[str, int]:
        for _ in range(3):
            group.broadcast(np.ones(1))
        return group.waits()

    for waits in as_threads(2, body):
        assert waits["rounds"] == 3
