"""The API keys a server takes. Only their digests travel to the processes that check them."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.config.config import ServerConfig, is_utf8
from headrace.errors import ConfigError

VARIABLE = "HEADRACE_API_KEY"
ADMIN_VARIABLE = "HEADRACE_ADMIN_API_KEY"


def digest(key: bytes) -> bytes:
    """Return the stored form of a key."""
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
    if not all(map(is_utf8, keys)):
        raise ConfigError(f"{VARIABLE} is not UTF-8")
    if config.api_key_file is not None:
        keys += keys_of_file(Path(config.api_key_file))
    return [key.strip() for key in keys]


def read_admin_key(
    config: ServerConfig, environment: Mapping[str, str], api_keys: Sequence[str] = ()
) -> str | None:
    """Return the key of --admin-api-key or, without, of the environment; None closes /admin.

    Raises:
        ConfigError: it is empty, or a client's.
    """
    key = config.admin_api_key
    key = environment.get(ADMIN_VARIABLE) if key is None else key
    if key is None:
        return None
    key = key.strip()
    if not is_utf8(key):
        raise ConfigError(f"{ADMIN_VARIABLE} is not UTF-8")
    if not key:
        raise ConfigError(f"--admin-api-key or {ADMIN_VARIABLE} is empty; it must be a key")
    if key in api_keys:
        raise ConfigError("--admin-api-key is an --api-key, too; clients must not have it")
    return key


def keys_of_file(path: Path) -> list[str]:
    """Return the keys of a file, one on each line that is not empty."""
    try:
        keys = path.read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error}") from None
    if not keys:
        raise ConfigError(f"--api-key-file {path} has no key; write one on each line")
    return keys
