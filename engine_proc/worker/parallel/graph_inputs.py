"""A table on the GPU with the addresses of captured graphs' inputs on all ranks.

During the capture of a graph a rank does not know the addresses of its tensors on other ranks. So
each captured all-reduce gets a row of the table, and reads the addresses from there. After all
ranks have captured, they exchange their addresses once and fill the rows.
"""

import msgspec

from headrace.engine_proc.collectives.collectives import CollectiveFailed, CollectiveOutcome
from headrace.engine_proc.worker.parallel.gpu_protocols import IpcRegion, Memory
from headrace.engine_proc.worker.parallel.ipc_group import IpcGroup
from headrace.engine_proc.worker.parallel.ipc_workspace import MAX_RANKS, NUM_ROWS, ROW
from headrace.engine_proc.worker.parallel.joint_steps import StepPeers, StepRefused, jointly, meet
from headrace.errors import HeadraceError


class Recapture(HeadraceError):
    """A graph's memory cannot be shared between processes: it is in no allocation that can be, or
    the driver refuses. All ranks raise this and capture again, in vain no more: inputs are then
    copied."""


class Input(msgspec.Struct, array_like=True, frozen=True):
    """A graph's input on one rank, and its collective."""

    region: IpcRegion | None
    call: str


class GraphInputs:
    """The table, and the inputs that have a row and are not in it yet."""

    def __init__(self, peers: StepPeers, memory: Memory, group: IpcGroup) -> None:
        self._peers, self._memory, self._group = peers, memory, group
        self._num_filled = 0
        self._waiting: list[tuple[int, int, str]] = []

    def add(self, address: int, num_bytes: int, call: str) -> int:
        """Return the address of a row for an input; 0 if there is none left.

        Args:
            call: what is done with it, the same on all ranks.
        """
        index = self._num_filled + len(self._waiting)
        if index == NUM_ROWS:
            return 0
        self._waiting.append((address, num_bytes, call))
        return self._group.rows_address + index * ROW.size

    def register(self) -> None:
        """Fill the rows on all ranks. No graph may run before.

        Raises:
            Recapture: on all ranks.
            CollectiveFailed: on all ranks, if they captured different graphs.
        """
        waiting, self._waiting = self._waiting, []
        own = [address for address, _, _ in waiting]
        try:
            answers = jointly(
                self._peers,
                "export of graphs' inputs",
                lambda: [Input(self._memory.export(a, n), call) for a, n, call in waiting],
                list[Input],
            )
            self._compare([[given.call for given in answer] for answer in answers])
            if any(given.region is None for answer in answers for given in answer):
                raise Recapture(
                    "graphs' memory cannot be shared between processes (expandable segments?)"
                )
            jointly(self._peers, "graphs' inputs", lambda: self._fill(own, answers), type(None))
        except StepRefused as error:
            raise Recapture(str(error)) from None
        self._num_filled += len(waiting)
        meet(self._peers)

    def _compare(self, calls: list[list[str]]) -> None:
        for rank, theirs in enumerate(calls):
            if theirs == calls[0]:
                continue
            pairs = enumerate(zip(theirs, calls[0], strict=False))
            index = next((i for i, (a, b) in pairs if a != b), min(len(theirs), len(calls[0])))
            text = (
                f"rank {rank} captured {len(theirs)} sums and rank 0 {len(calls[0])}; "
                f"they differ from number {index} on"
            )
            raise CollectiveFailed(CollectiveOutcome.MISMATCH, rank, text)

    def _fill(self, own: list[int], answers: list[list[Input]]) -> None:
        rows = bytearray()
        for index, address in enumerate(own):
            addresses = [0] * MAX_RANKS
            for rank, answer in enumerate(answers):
                region = answer[index].region
                assert region is not None
                addresses[rank] = self._group.address_of(rank, region)
            addresses[self._peers.rank] = address
            rows += ROW.pack(*addresses)
        if rows:
            first = self._group.rows_address + self._num_filled * ROW.size
            self._memory.write(first, bytes(rows))
