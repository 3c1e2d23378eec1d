"""Links between machines: ZeroMQ over TCP, encrypted and authenticated by CURVE.

One end listens at one address. A peer without the key gets nothing, and nothing of it is read: the
handshake fails within libzmq. A message is a list of frames, as in `sockets.py`.
"""

import logging
import struct
from socket import SOCK_STREAM, create_connection, getaddrinfo
from typing import Any

import zmq
from zmq.utils.z85 import decode

from headrace.errors import ConfigError
from headrace.ipc.curve_key import CurveKey
from headrace.ipc.sockets import POLLIN, Frame, receive_whole, send_whole

ZAP = "inproc://zeromq.zap.01"  # where libzmq asks which peers may come: RFC 27 of ZeroMQ
ZAP_VERSION = b"1.0"
HANDSHAKE_MS = 5000  # a connection that is not through by then is closed
HEARTBEAT_MS = 500  # libzmq asks the other end, whose libzmq answers
SILENCE_MS = 5000  # after which a connection is lost
HIGH_WATER = 256  # messages to a peer
# Of a peer that announces a larger frame the connection ends, and nothing is allocated for it. Most
# are the hidden states of a step: 512 MiB are 8,192 tokens with 16,384 numbers each.
MAX_FRAME_BYTES = 1 << 29
SEALED_BYTES = 64  # that encryption adds to a frame, at most
EVENT = struct.Struct("=HI")  # of a socket: what, and a value
PROBE_S = 0.1  # for an answer whether anything listens
BACKLOG = 64  # connections that the kernel holds
REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH

log = logging.getLogger(__name__)


def curve_socket(kind: int, key: CurveKey, where: str) -> "zmq.Socket[bytes]":
    """Return a socket for an address that has the key."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.set_hwm(HIGH_WATER)
    socket.linger = 0
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + SEALED_BYTES)
    socket.set(zmq.IPV6, "[" in where)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.curve_secretkey = key.secret
    socket.curve_publickey = key.public
    return socket


def close_monitored(socket: "zmq.Socket[bytes]", events: "zmq.Socket[bytes]") -> None:
    """Close a socket and what tells of its events; what waits is lost."""
    socket.disable_monitor()
    events.close(linger=0)
    socket.close(linger=0)


def resolved(where: str) -> tuple[str, int] | None:
    """Return the address and port of the machine at `tcp://HOST:PORT`; None if it is unknown."""
    host, _, port = where.removeprefix("tcp://").rpartition(":")
    try:
        found = getaddrinfo(host.strip("[]"), port, type=SOCK_STREAM)
    except OSError:
        return None
    return str(found[0][4][0]), int(port)


class PeerLeft(ConnectionError):
    """There is no connection to a peer any more."""


class CurveListener:
    """The listening end. Several peers may connect; each message comes with its peer's name.

    Args:
        label: what gives the address, for errors, such as a flag.
    """

    def __init__(self, where: str, key: CurveKey, label: str) -> None:
        """Listen.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._key = key
        self._gate: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
        self._gate.set(zmq.LINGER, 0)
        self._gate.bind(ZAP)
        self._socket = curve_socket(zmq.ROUTER, key, where)
        self._socket.curve_server = True
        self._socket.router_mandatory = True
        self._socket.backlog = BACKLOG
        self._socket.zap_domain = b"headrace"
        self._events = self._socket.get_monitor_socket(REFUSALS)
        self._messages = [(self._socket, POLLIN)]
        self._questions = [(self._gate, POLLIN), (self._events, POLLIN)]
        self._is_told = False
        try:
            self._socket.bind(where)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"{label} {where} cannot be bound: {error}") from None
        self.where = str(self._socket.get_string(zmq.LAST_ENDPOINT))

    @property
    def polled(self) -> list[tuple[Any, int]]:
        """What tells that there is something to do here."""
        return [*self._messages, *self._questions]

    def admit(self) -> None:
        """Answer libzmq's questions about peers, and log the first refusal."""
        if not zmq.zmq_poll(self._questions, 0):  # a socket's own poll takes three times as long
            return
        while self._gate.poll(0):
            _version, number, _domain, _address, _identity, _mechanism, *credentials = (
                self._gate.recv_multipart()
            )
            has_key = credentials == [decode(self._key.public)]
            answer = (b"200", b"OK", b"peer", b"") if has_key else (b"400", b"no key", b"", b"")
            self._gate.send_multipart([ZAP_VERSION, number, *answer])
        while self._events.poll(0):
            self._events.recv_multipart()
            if not self._is_told:
                self._is_told = True
                log.warning("a peer without the key was refused; others will not be logged")

    def receive(self) -> tuple[bytes, list[Frame]] | None:
        """Return the name of a peer and its next message, or None."""
        if not zmq.zmq_poll(self._messages, 0):
            return None
        name, *frames = receive_whole(self._socket)
        return name.bytes, [frame.buffer for frame in frames]

    def send(self, peer: bytes, frames: list[Frame]) -> bool:
        """Send a message; return False where the peer is gone, or too much waits for it."""
        try:
            return self.try_send(peer, frames)
        except PeerLeft:
            return False

    def try_send(self, peer: bytes, frames: list[Frame]) -> bool:
        """Send a message; return False where too much waits for the peer.

        Raises:
            PeerLeft: the peer is gone.
        """
        try:
            send_whole(self._socket, [peer, *frames])
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise PeerLeft(str(error)) from None
        return True

    def close(self) -> None:
        """Stop listening; unread messages are lost."""
        close_monitored(self._socket, self._events)
        self._gate.unbind(ZAP)  # to close it alone frees the name later
        self._gate.close(linger=0)


class CurveLink:
    """The connecting end. It connects again and again, where there is no connection.

    Args:
        keeps_alive: a connection through which nothing comes is lost, though nothing closes it.
        high_water: messages that are received ahead. Where they are not read, no answer to a
            heartbeat is: half of them should take the reader far less than `SILENCE_MS`.
    """

    def __init__(
        self, where: str, key: CurveKey, keeps_alive: bool = False, high_water: int = HIGH_WATER
    ) -> None:
        """Begin to connect.

        Raises:
            ValueError: it is no address.
        """
        self._socket = curve_socket(zmq.DEALER, key, where)
        self._socket.set(zmq.RCVHWM, high_water)
        if keeps_alive:
            self._socket.heartbeat_ivl = HEARTBEAT_MS
            self._socket.heartbeat_timeout = SILENCE_MS
        self._socket.set(zmq.TCP_MAXRT, SILENCE_MS)  # lost, too, where what is sent does not arrive
        self._socket.curve_serverkey = key.public
        self._socket.immediate = True  # nothing waits for a connection that there is not
        self._events = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | REFUSALS
        )
        try:
            self._socket.connect(where)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"{where} is no address to connect to: {error}") from None
        self._where = where
        self._has_connected = False
        self._peer: tuple[str, int] | None = None  # as far as it is known
        self._messages = [(self._socket, POLLIN)]
        self._changes = [(self._events, POLLIN)]
        self.is_connected = False

    @property
    def polled(self) -> list[tuple[Any, int]]:
        """What tells that there is something to do here."""
        return [*self._messages, *self._changes]

    def lost_connections(self) -> int:
        """Return how many connections have ended since the last call, refused ones among them."""
        num_lost = 0
        while zmq.zmq_poll(self._changes, 0):
            event = EVENT.unpack_from(self._events.recv_multipart()[0])[0]
            self.is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._has_connected = self._has_connected or self.is_connected
            num_lost += not self.is_connected
        return num_lost

    def is_refused(self) -> bool:
        """Whether its machine answers that nothing listens there: the peer's process has ended."""
        if self._peer is None and self._has_connected:  # may ask a name server
            self._peer = resolved(self._where)
        if self._peer is None:
            return False
        try:
            create_connection(self._peer, PROBE_S).close()
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        return False

    def receive(self) -> list[Frame] | None:
        """Return the next message, or None."""
        if not zmq.zmq_poll(self._messages, 0):
            return None
        return [frame.buffer for frame in receive_whole(self._socket)]

    def send(self, frames: list[Frame]) -> bool:
        """Send a message; return False where there is no connection, or it is full."""
        try:
            send_whole(self._socket, frames)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Drop the connection with what waits."""
        close_monitored(self._socket, self._events)
