"""Hosts are named as people write them; what allows a URL is its very host, and its port."""

import pytest

from headrace.config.config import ServerConfig
from headrace.config.media_domains import MediaDomain, allowed_domain, read_domain
from headrace.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "domain"),
    [
        ("Example.com", MediaDomain("example.com")),
        ("images.local:8080", MediaDomain("images.local", 8080)),
        ("[::1]:80", MediaDomain("::1", 80)),
        ("[2606:4700::1111]", MediaDomain("2606:4700::1111")),
    ],
)
def test_a_domain_is_a_host_and_may_have_a_port(text: str, domain: MediaDomain) -> None:
    assert read_domain(text) == domain


@pytest.mark.parametrize("text", ["", "*", "http://a.com", "a.com/x", "a:0", "a:70000", "a b"])
def test_what_is_no_host_is_refused_as_a_flag(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"--allowed-media-domains .* is no host; it must be like"
    ):
        ServerConfig(allowed_media_domains=("example.com", text))


@pytest.mark.parametrize(
    ("host", "port", "entry"),
    [
        ("a.com", None, "a.com"),
        ("a.com", 443, "a.com"),
        ("a.com", 8443, None),  # another server
        ("b.com", 8443, "b.com:8443"),
        ("b.com", None, None),
        ("c.com", None, "c.com:443"),
        ("sub.a.com", None, None),
        ("xa.com", None, None),
    ],
)
def test_a_url_is_allowed_by_its_host_and_port(
    host: str, port: int | None, entry: str | None
) -> None:
    domains = [read_domain(text) for text in ("a.com", "b.com:8443", "c.com:443")]
    expected = None if entry is None else read_domain(entry)
    assert allowed_domain(domains, host, port, 443) == expected
