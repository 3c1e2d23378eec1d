"""Messages there and back between two processes: the pace of a machine at what servers wait for.

A ping waits a moment for its turn, as a request finds processes that sleep.
"""

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import zmq

from support.ports import reserved_port

NUM_PINGS = 500
PAUSE_S = 0.002
MESSAGE = bytes(500)
PATIENCE_S = 10
BENCH = str(Path(__file__).parents[1])

Exchange = tuple[Callable[[bytes], object], Callable[[], bytes]]


def sockets(port: int, _secret: bytes, is_server: bool, stack: ExitStack) -> Exchange:
    """Return how to send and receive over TCP, without anything between."""
    if is_server:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", port)))
        one, _ = listener.accept()
    else:
        one = connected(port)
    stack.enter_context(one)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one.sendall, lambda: one.recv(len(MESSAGE))


def connected(port: int) -> socket.socket:
    """Return a connection to what is about to listen."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(PAUSE_S)


def curve(port: int, secret: bytes, is_server: bool, stack: ExitStack) -> Exchange:
    """Return how to send and receive as links between machines do."""
    context = stack.enter_context(zmq.Context())
    one: zmq.Socket[bytes] = stack.enter_context(context.socket(zmq.PAIR))
    public = zmq.curve_public(secret)
    one.curve_secretkey, one.curve_publickey = secret, public
    if is_server:
        one.curve_server = True
        one.bind(f"tcp://127.0.0.1:{port}")
    else:
        one.curve_serverkey = public
        one.connect(f"tcp://127.0.0.1:{port}")
    return one.send, one.recv


KINDS = {"a socket": sockets, "ZeroMQ with CURVE": curve}


def echo(kind: str, port: str, secret: str) -> None:
    """Send back what comes, for ever."""
    with ExitStack() as stack:
        send, receive = KINDS[kind](int(port), secret.encode(), True, stack)
        while True:
            send(receive())


def one_way_ms(kind: str) -> float:
    """Return half of what a message there and back takes, ms, the median of some hundreds."""
    times = list[float]()
    with reserved_port() as port, ExitStack() as stack:
        _, secret = zmq.curve_keypair()
        command = [sys.executable, __file__, kind, str(port), secret.decode()]
        other = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": BENCH})
        stack.callback(other.wait)
        stack.callback(other.kill)
        send, receive = KINDS[kind](port, secret, False, stack)
        for _ in range(NUM_PINGS):
            time.sleep(PAUSE_S)
            began = time.perf_counter()
            send(MESSAGE)
            receive()
            times.append(1e3 * (time.perf_counter() - began) / 2)
    return statistics.median(times)


if __name__ == "__main__":
    echo(*sys.argv[1:])
