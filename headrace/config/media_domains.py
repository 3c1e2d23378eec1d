"""Hosts that images may be fetched from, by `--allowed-media-domains`. Pure."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.errors import ConfigError

DOMAIN = re.compile(r"(?P<host>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>\d{1,5}))?", re.IGNORECASE)
MAX_PORT = 65535


@dataclass(frozen=True)
class MediaDomain:
    """A host. With a port it is that server, at whatever address; without, its scheme's own port,
    where the host is at a public address."""

    host: str  # lower-case; brackets of an IPv6 address left out
    port: int | None = None


def read_domain(text: str) -> MediaDomain:
    """Return an entry of `--allowed-media-domains`.

    Raises:
        ConfigError: it is neither a host nor HOST:PORT.
    """
    found = DOMAIN.fullmatch(text)
    port = int(found["port"]) if found and found["port"] else None
    if found is None or port == 0 or (port or 0) > MAX_PORT:
        raise ConfigError(
            f"--allowed-media-domains {text} is no host; it must be like example.com or "
            "images.local:8080"
        )
    return MediaDomain(found["host"].strip("[]").lower(), port)


def allowed_domain(
    domains: Iterable[MediaDomain], host: str, port: int | None, own_port: int
) -> MediaDomain | None:
    """Return the entry that allows a URL, if there is one.

    Args:
        port: of the URL, where it says one.
        own_port: of its scheme.
    """
    wanted = [MediaDomain(host, port or own_port)]
    if port in (None, own_port):
        wanted.append(MediaDomain(host))
    return next((domain for domain in wanted if domain in domains), None)
