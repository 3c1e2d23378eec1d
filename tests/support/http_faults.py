"""Requests whose framing is wrong or in doubt, or that are no HTTP/1.1, by name. Pure.

`PATH` stands for a request's path. After each comes a body that has requests in it.
"""

from collections.abc import Callable

LINE = b"POST PATH HTTP/1.1\r\n"
START = LINE + b"Host: x\r\nContent-Type: application/json\r\n"
LIMIT = 100 << 10  # bytes, more than a head or a trailer may have
Fault = Callable[[bytes], tuple[bytes, bytes]]


def one_chunk(body: bytes) -> bytes:
    """Return a body as one chunk and the last."""
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


def with_length(length: bytes) -> Fault:
    """Return a fault: a Content-Length of which `LEN` is the right one."""

    def make(body: bytes) -> tuple[bytes, bytes]:
        value = length.replace(b"LEN", b"%d" % len(body))
        return START + b"Content-Length: " + value + b"\r\n\r\n", body

    return make


def with_coding(field: bytes) -> Fault:
    """Return a fault: a field in place of `Transfer-Encoding: chunked`."""
    return lambda body: (START + field + b"\r\n\r\n", one_chunk(body))


def with_chunk(chunk: bytes) -> Fault:
    """Return a fault: a first chunk, in which `LEN` is the size of `BODY`."""

    def make(body: bytes) -> tuple[bytes, bytes]:
        first = chunk.replace(b"LEN", b"%x" % len(body)).replace(b"BODY", body)
        return START + b"Transfer-Encoding: chunked\r\n\r\n", first + b"0\r\n\r\n"

    return make


def with_head(head: bytes) -> Fault:
    """Return a fault: a head, to which the right Content-Length is added."""
    return lambda body: (head + b"Content-Length: %d\r\n\r\n" % len(body), body)


def with_bare_lf(body: bytes) -> tuple[bytes, bytes]:
    """End the lines of a head by LF alone."""
    head, sent = with_head(START)(body)
    return head.replace(b"\r\n", b"\n"), sent


LENGTHS = {
    **{"two lengths": b"5\r\nContent-Length: LEN", "a list of lengths": b"5, LEN"},
    **{"equal lengths": b"LEN\r\nContent-Length: LEN", "a list of equal lengths": b"LEN, LEN"},
    **{"a negative length": b"-5", "a signed length": b"+LEN", "a length in hex": b"0x5"},
    **{
        "no digits": b"",
        "a length in two parts": b"1 0",
        "a length past 64 bits": b"18446744073709551621",
    },
    **{
        "a length of 30 digits": b"9" * 30,
        "a folded length": b"\r\n LEN",
        "a length with a NUL": b"LEN\0",
    },
}
TE = b"Transfer-Encoding"
CODINGS = {
    "chunked is not last": TE + b": chunked, identity",
    "another coding before": TE + b": gzip, chunked",
    "an unknown coding": TE + b": xchunked",
    "identity": TE + b": identity",
    "no coding": TE + b":",
    "chunked twice": TE + b": chunked, chunked",
    "chunked in quotes": TE + b': "chunked"',
    "chunked with a vertical tab": TE + b": \x0bchunked",
    "two codings": TE + b": chunked\r\nTransfer-Encoding: identity",
    "a space before the colon": TE + b" : chunked\r\nContent-Length: 3",
    "a folded coding": TE + b":\r\n chunked",
    "a coding after a bare CR": b"X: a\r" + TE + b": chunked\r\nContent-Length: 3",
    "a coding after a NUL": b"X: a\0\r\n" + TE + b": chunked",
    "chunks and a length": TE + b": chunked\r\nContent-Length: 3",
    "a length and chunks": b"Content-Length: 3\r\n" + TE + b": chunked",
}
CHUNKS = {
    "a negative size": b"-1\r\nBODY\r\n",
    "a size with 0x": b"0xLEN\r\nBODY\r\n",
    "a signed size": b"+LEN\r\nBODY\r\n",
    "a space before the size": b" LEN\r\nBODY\r\n",
    "a space after the size": b"LEN \r\nBODY\r\n",
    "no size": b"\r\nBODY\r\n",
    "a size past 64 bits": b"fffffffffffffffffff\r\nBODY\r\n",
    "a size that is no number": b"g\r\nBODY\r\n",
    "an extension with a bare LF": b"LEN;a\nBODY\r\n",
    "a size with a bare LF": b"LEN\nBODY\r\n",
    "a chunk without an end": b"LEN\r\nBODY",
    "a chunk longer than its size": b"1\r\nBODY\r\n",
    "an extension without end": b"LEN;" + b"x" * LIMIT + b"\r\nBODY\r\n",
    "a trailer without end": b"LEN\r\nBODY\r\n0\r\n" + b"X: y\r\n" * (LIMIT // 6) + b"\r\n",
    "a length for a trailer": b"LEN\r\nBODY\r\n0\r\nContent-Length: 5\r\n\r\n",
    "a folded trailer": b"LEN\r\nBODY\r\n0\r\nX: y\r\n z\r\n\r\n",
}
HEADS = {
    "HTTP/2.0": b"POST PATH HTTP/2.0\r\nHost: x\r\n",
    "HTTP/1.2": b"POST PATH HTTP/1.2\r\nHost: x\r\n",
    "HTTP/1.0": b"POST PATH HTTP/1.0\r\nHost: x\r\n",
    "HTTP/0.9": b"GET PATH\r\nHost: x\r\n",
    "HTTP in small letters": b"POST PATH http/1.1\r\nHost: x\r\n",
    "CONNECT": b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\nHost: x\r\n",
    "no method": b" PATH HTTP/1.1\r\nHost: x\r\n",
    "an unknown method": b"SMUGGLE PATH HTTP/1.1\r\nHost: x\r\n",
    "a space in the path": b"POST PATH /x HTTP/1.1\r\nHost: x\r\n",
    "a tab after the method": b"POST\tPATH HTTP/1.1\r\nHost: x\r\n",
    "a whole address": b"POST http://xPATH HTTP/1.1\r\nHost: x\r\n",
    "a path without end": b"POST PATH" + b"x" * LIMIT + b" HTTP/1.1\r\nHost: x\r\n",
    "no host": LINE,
    "two hosts": LINE + b"Host: x\r\nHost: y\r\n",
    "a host that is none": LINE + b"Host: a b\r\n",
    "a line without a colon": START + b"nothing\r\n",
    "a header without a name": START + b": x\r\n",
    "a name with a space": START + b"X Y: z\r\n",
    "a folded header": START + b"X: y\r\n Content-Length: 5\r\n",
    "a header without end": START + b"X: " + b"x" * LIMIT + b"\r\n",
    "10,000 headers": START + b"X: y\r\n" * 10_000,
    "an unknown expectation": START + b"Expect: 200-maybe\r\n",
    "two keys": START + b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n",
    "a text for JSON": LINE + b"Host: x\r\nContent-Type: text/plain\r\n",
}
FAULTS: dict[str, Fault] = {
    **{name: with_length(length) for name, length in LENGTHS.items()},
    **{name: with_coding(field) for name, field in CODINGS.items()},
    **{name: with_chunk(chunk) for name, chunk in CHUNKS.items()},
    **{name: with_head(head) for name, head in HEADS.items()},
    "bare LF": with_bare_lf,
}
