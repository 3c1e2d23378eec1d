"""Workers tell each other bytes through memory of the host."""

from ranks import as_threads

from headrace.engine_proc.collectives.shm_all_reduce import ShmAllReduce
from headrace.engine_proc.worker.parallel.host_peers import HostPeers


def test_every_rank_receives_each_message_of_any_length() -> None:
    def body(group: ShmAllReduce) -> list[object]:
        peers = HostPeers(group)
        said = [peers.gather(b"x" * length * peers.rank) for length in (1000, 0, 1)]
        return [peers.rank, peers.world, *said, peers.gather_number(10 - peers.rank)]

    said = [[b"", b"x" * 1000, b"x" * 2000], [b"", b"", b""], [b"", b"x", b"xx"], [10, 9, 8]]
    assert as_threads(3, body) == [[rank, 3, *said] for rank in range(3)]
