"""What a head must say: a host, one key, a type of the body."""

import pytest

from headrace.frontend.http.conformance import body_fault, head_fault
from headrace.frontend.http.request_head import RequestHead

HOST = (b"host", b"x")
SOME = (b"content-length", b"2")


def status_of_body(*headers: tuple[bytes, bytes], method: str = "POST") -> int:
    fault = body_fault(method, RequestHead.of([HOST, *headers]))
    return 0 if fault is None else fault.status


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        *((b, 0) for b in (b"application/json", b"Application/JSON ; charset=utf-8")),
        *((b, 415) for b in (b"", b"text/plain", b"application/x-www-form-urlencoded")),
        *((b, 415) for b in (b"multipart/form-data; boundary=x", b"application/vnd.api+json")),
    ],
)
def test_body_is_json_by_its_content_type(content_type: bytes, status: int) -> None:
    for framing in (SOME, (b"transfer-encoding", b"chunked")):
        assert status_of_body((b"content-type", content_type), framing) == status


def test_body_without_a_content_type_is_refused() -> None:
    assert status_of_body(SOME) == 415


def test_request_without_a_body_needs_no_content_type() -> None:
    assert status_of_body() == status_of_body((b"content-length", b"0")) == 0
    assert status_of_body(SOME, method="GET") == 0


@pytest.mark.parametrize(
    ("version", "hosts"),
    [
        ("1.1", ()),
        ("1.1", (b"a", b"a")),
        ("1.0", (b"a", b"b")),
        *(("1.1", (bad,)) for bad in (b"a b", b"a/b", b"a:b", b"[::1", b"\xe4", b"@", b"%zz")),
    ],
)
def test_bad_host_is_refused(version: str, hosts: tuple[bytes, ...]) -> None:
    fault = head_fault(version, RequestHead.of([(b"host", host) for host in hosts]))
    assert fault is not None
    assert (fault.status, fault.code) == (400, "invalid_host")


@pytest.mark.parametrize(
    "host", [b"", b"a", b"a.b-c_d:80", b"127.0.0.1:8000", b"[::1]:8000", b"[fe80::1%25eth0]", b"a:"]
)
def test_valid_host_is_taken(host: bytes) -> None:
    assert head_fault("1.1", RequestHead.of([(b"host", host)])) is None


def test_http_1_0_may_lack_a_host() -> None:
    assert head_fault("1.0", RequestHead.of([])) is None


def test_two_authorizations_are_refused() -> None:
    keys = [(b"authorization", b"Bearer a"), (b"authorization", b"Basic b")]
    fault = head_fault("1.1", RequestHead.of([HOST, *keys]))
    assert fault is not None
    assert (fault.status, fault.code) == (400, "repeated_header")
    assert head_fault("1.1", RequestHead.of([HOST, keys[0]])) is None
