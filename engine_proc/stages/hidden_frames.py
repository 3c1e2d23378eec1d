"""Hidden states on their way between machines: out of a link in shared memory, and into another.

Rows go as they are, in the order of this processor, which is that of all that Headrace runs on.
"""

import numpy as np

from headrace.engine_proc.shm.hidden_link import FAILED, NUMBER_BYTES, HiddenLink
from headrace.ipc.remote_messages import HiddenFrame
from headrace.ipc.sockets import Frame
from headrace.runtime.message_checks import check


class FrameSource:
    """Takes frames from a link and numbers them."""

    def __init__(self, link: HiddenLink, run: int) -> None:
        self._link = link
        self._run = run
        self._number = 0

    def take(self, timeout_s: float) -> tuple[HiddenFrame, list[Frame]] | None:
        """Wait for the next frame; return it with its rows, or None after `timeout_s`."""
        if not self._link.wait(timeout_s):
            return None
        rows = self._link.rows()
        frame = HiddenFrame(self._run, self._number, FAILED if rows is None else len(rows))
        data: list[Frame] = [] if rows is None else [rows.tobytes()]
        self._link.release()
        self._number += 1
        return frame, data


class FrameSink:
    """Writes frames into a link, each once and in their order.

    Args:
        max_rows: of a frame, like `row_size` as the link has it.
    """

    def __init__(self, link: HiddenLink, max_rows: int, row_size: int) -> None:
        self._link = link
        self._max_rows, self._row_bytes = max_rows, NUMBER_BYTES * row_size
        self._number = 0

    def write(self, frame: HiddenFrame, data: list[Frame]) -> None:
        """Write a frame of another machine.

        Raises:
            WrongMessage: it is not the next one, is not whole, or has too many rows.
        """
        number, num_rows = frame.number, frame.num_rows
        check(number == self._number, f"frame {number}, where {self._number} is the next")
        self._number += 1
        check(self._link.has_room, "it has sent more frames than there are steps in flight")
        if num_rows == FAILED:
            check(not data, "rows of a step that has failed")
            self._link.send()
            return
        check(0 < num_rows <= self._max_rows, f"{num_rows} rows, at most {self._max_rows} fit")
        sizes = [memoryview(one).nbytes for one in data]
        check(sizes == [num_rows * self._row_bytes], f"{sizes} bytes of {num_rows} rows")
        self._link.room(num_rows)[:] = np.frombuffer(data[0], np.float32).reshape(num_rows, -1)
        self._link.send(num_rows)
