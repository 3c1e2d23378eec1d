"""Addresses that images may be fetched from. Pure.

Non-public addresses trust requests from this machine: other services on it, its neighbors,
the metadata of a cloud. Of IPv6, only global unicast (2000::/3) is public: the rest maps or
translates to IPv4 addresses, or stays within a site.
"""

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

UNICAST = IPv6Network("2000::/3")
TUNNELS = (IPv6Network("2001::/32"), IPv6Network("2002::/16"))  # Teredo, 6to4: IPv4 within


def is_public(text: str) -> bool:
    """Whether an address is public, so that the fetcher may connect to it."""
    address = ip_address(text)
    if isinstance(address, IPv6Address):
        is_plain = address in UNICAST and not any(address in tunnel for tunnel in TUNNELS)
        return is_plain and address.is_global and not address.scope_id
    return address.is_global and not address.is_multicast and not address.is_reserved


def is_for_one(text: str) -> bool:
    """Whether one server may be at an address, public or not; a cloud's metadata is none."""
    address = ip_address(text)
    plain: IPv4Address | IPv6Address | None = getattr(address, "ipv4_mapped", None)
    plain = plain or address
    return not (plain.is_link_local or plain.is_multicast or plain.is_unspecified)
