"""An HTTP/1.1 client with blocking calls."""

import socket
from collections.abc import Sequence
from urllib.parse import urlsplit


class Client:
    """One connection that is kept, with blocking calls: nothing costs less."""

    def __init__(self, url: str, key: str = "") -> None:
        """Connect; `key` is an API key."""
        where = urlsplit(url)
        self._authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        self._host = where.netloc
        self._socket = socket.create_connection((where.hostname, where.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(1 << 20)

    def send(self, method: str, path: str, body: bytes = b"") -> None:
        """Send a request."""
        self.send_pieces(method, path, [body])

    def send_pieces(self, method: str, path: str, pieces: Sequence[bytes]) -> None:
        """Send a request whose body is in pieces, which are not copied where they are long."""
        length = sum(map(len, pieces))
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Length: {length}\r\n"
        head += f"Content-Type: application/json\r\n{self._authorization}\r\n"
        if length < 4096:
            pieces = [b"".join([head.encode(), *pieces])]
        else:
            self._socket.sendall(head.encode())
        for piece in pieces:
            self._socket.sendall(piece)

    def receive(self) -> bytes:
        """Return the received bytes, at least one."""
        size = self._socket.recv_into(self._buffer)
        if size == 0:
            raise ConnectionError("the server closed the connection")
        return bytes(memoryview(self._buffer)[:size])

    def response(self) -> int:
        """Read a whole response with a length; return its status."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += self.receive()
        head, _, body = data.partition(b"\r\n\r\n")
        (length,) = (
            int(line[15:])
            for line in head.lower().split(b"\r\n")
            if line[:15] == b"content-length:"
        )
        left = length - len(body)
        while left > 0:
            left -= self._socket.recv_into(self._buffer)
        return int(head[9:12])
