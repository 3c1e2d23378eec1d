"""A way between two machines that delays all packets and drops some, as `tc netem` does.

Not all kernels have netem. All have TUN devices: there is one on each side, and a thread that takes
the packets of one to the other.
"""

import fcntl
import os
import random
import selectors
import struct
import threading
import time
from collections import deque
from contextlib import suppress

TUN = "/dev/net/tun"
TUNSETIFF = 0x400454CA  # of Linux, as the next two
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MAX_PACKET = 1 << 16
LOOK_S = 0.1
SEED = 7


class SlowLink:
    """Two devices with a way between them.

    Args:
        names: of the devices. Both are in this namespace at first.
        delay_s: of each packet.
        loss: the share of packets that are dropped.

    Attributes:
        num_carried: packets.
        num_dropped: packets.
    """

    def __init__(self, names: tuple[str, str], delay_s: float, loss: float) -> None:
        """Make it.

        Raises:
            OSError: this user, or the kernel, makes no such devices.
        """
        self._delay_s, self._loss = delay_s, loss
        self.num_carried = self.num_dropped = 0
        self._ends = [open_device(name) for name in names]
        self._has_ended = False
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _carry(self) -> None:
        chance = random.Random(SEED)
        under_way: deque[tuple[float, int, bytes]] = deque()  # when due, to where
        first, second = self._ends
        with selectors.DefaultSelector() as selector:
            selector.register(first, selectors.EVENT_READ, second)
            selector.register(second, selectors.EVENT_READ, first)
            while not self._has_ended:
                due_s = under_way[0][0] - time.monotonic() if under_way else LOOK_S
                for key, _ in selector.select(max(due_s, 0)):
                    packet = os.read(key.fd, MAX_PACKET)
                    if chance.random() < self._loss:
                        self.num_dropped += 1
                    else:
                        under_way.append((time.monotonic() + self._delay_s, key.data, packet))
                while under_way and under_way[0][0] <= time.monotonic():
                    _, end, packet = under_way.popleft()
                    with suppress(OSError):  # a device that is not up yet
                        os.write(end, packet)
                        self.num_carried += 1

    def close(self) -> None:
        """Remove both devices."""
        self._has_ended = True
        self._thread.join()
        for end in self._ends:
            os.close(end)


def open_device(name: str) -> int:
    """Make a TUN device, which lasts as long as the descriptor that is returned."""
    fd = os.open(TUN, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    except OSError:
        os.close(fd)
        raise
    return fd
