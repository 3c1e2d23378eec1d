"""Addresses."""


def get_node_ip_address() -> str:
    """Return the address of this node."""
    return "127.0.0.1"
