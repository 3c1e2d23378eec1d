"""The API keys a server takes. Only their digests travel to the processes that check them."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from headrace.config import ServerConfig
from headrace.errors import ConfigError

VARIABLE = "HEADRACE_API_KEY"


def digest(key: bytes) -> bytes:
    """Return what is kept of a key."""
    return hashlib.sha256(key).digest()


def read_api_keys(config: ServerConfig, environment: Mapping[str, str]) -> list[str]:
    """Return the keys of --api-key, --api-key-file and the environment; none is an open server.

    Raises:
        ConfigError: a key is empty, or the file cannot be read or has none.
    """
    keys = [*config.api_key]
    if VARIABLE in environment:
        keys.append(environment[VARIABLE])
    if not all(key.strip() for key in keys):
        raise ConfigError(f"--api-key or {VARIABLE} is empty; it must be the key that clients send")
    if config.api_key_file is not None:
        keys += keys_of_file(Path(config.api_key_file))
    return [key.strip() for key in keys]


def keys_of_file(path: Path) -> list[str]:
    """Return the keys of a file, one on each line that is not empty."""
    try:
        keys = path.read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error}") from None
    if not keys:
        raise ConfigError(f"--api-key-file {path} has no key; write one on each line")
    return keys
