"""Replicas share the cores, node by node."""

from pathlib import Path

import pytest

from headrace.system.cpu_share import cores_in, num_nodes, numa_nodes, share_of


def test_shares_are_parts_of_all_cores() -> None:
    shares = [share_of(range(10), [], index, 4) for index in range(4)]
    assert [len(share) for share in shares] == [2, 3, 2, 3]
    assert set().union(*shares) == set(range(10))


def test_a_share_stays_on_one_node_where_nodes_are_enough() -> None:
    nodes = [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [share_of(range(8), nodes, index, 2) for index in range(2)] == [*map(set, nodes)]
    assert share_of({3, 5, 9}, nodes, 1, 2) == {5, 9}, "cores that are not ours are left out"


def test_as_many_shares_as_nodes_are_the_nodes() -> None:
    nodes = [[0, 1, 2, 3, 4, 5], [6, 7], []]  # the last one has memory alone
    assert [share_of(range(8), nodes, index, 2) for index in range(2)] == [*map(set, nodes[:2])]
    assert [share_of({4, 5, 6}, nodes, index, 2) for index in range(2)] == [{4, 5}, {6}]
    assert [len(share_of(range(8), nodes, index, 4)) for index in range(4)] == [2, 2, 2, 2]


@pytest.mark.parametrize(("cores", "expected"), [(range(8), 2), ({6}, 1), ({0, 7}, 2), ({90}, 1)])
def test_nodes_with_cores_of_ours_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: set[int], expected: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(cores))
    for node, text in enumerate(("0-5", "6-7", "")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text + "\n")
    assert num_nodes(tmp_path) == expected


def test_shares_overlap_where_cores_are_few() -> None:
    assert [share_of([7], [], index, 3) for index in range(3)] == [{7}, {7}, {7}]
    assert [share_of([4, 5], [], index, 3) for index in range(3)] == [{4}, {4}, {5}]


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3,8,10-11\n", [0, 1, 2, 3, 8, 10, 11]), ("\n", []), ("5\n", [5])]
)
def test_lists_of_cores_are_read(text: str, cores: list[int]) -> None:
    assert cores_in(text) == cores


def test_nodes_are_read_in_their_order(tmp_path: Path) -> None:
    for node, cores in ((10, "4-5"), (2, "0-1"), (0, "2-3")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    assert numa_nodes(tmp_path) == [[2, 3], [0, 1], [4, 5]]
