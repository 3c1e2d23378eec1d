"""Where API keys come from."""

from pathlib import Path

import pytest

from headrace.config.api_keys import ADMIN_VARIABLE, VARIABLE, read_admin_key, read_api_keys
from headrace.config.config import ServerConfig
from headrace.config.flags import from_flags
from headrace.errors import ConfigError


def test_a_server_without_keys_is_open() -> None:
    assert read_api_keys(ServerConfig(), {}) == []


def test_keys_come_from_flags_the_environment_and_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("three\n\n  four\n")
    config = from_flags(["--api-key", "one", "--api-key", "two ", "--api-key-file", str(path)])
    assert config.api_key == ("one", "two ")
    keys = read_api_keys(config, {VARIABLE: "five"})
    assert keys == ["one", "two", "five", "three", "four"]


@pytest.mark.parametrize(("config", "environment"), [(("",), {}), ((), {VARIABLE: " "})])
def test_an_empty_key_is_refused(config: tuple[str, ...], environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        read_api_keys(ServerConfig(api_key=config), environment)


def test_a_key_that_is_not_utf_8_is_refused_and_not_shown() -> None:
    key = b"secret\xff".decode(errors="surrogateescape")
    with pytest.raises(ConfigError, match=r"^HEADRACE_API_KEY is not UTF-8$"):
        read_api_keys(ServerConfig(), {"HEADRACE_API_KEY": key})
    with pytest.raises(ConfigError, match=r"^HEADRACE_ADMIN_API_KEY is not UTF-8$"):
        read_admin_key(ServerConfig(), {"HEADRACE_ADMIN_API_KEY": key})


def test_a_file_without_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with pytest.raises(ConfigError, match=f"--api-key-file {path} cannot be read: .*No such file"):
        read_api_keys(ServerConfig(api_key_file=str(path)), {})
    path.write_text("\n")
    with pytest.raises(ConfigError, match="has no key; write one on each line"):
        read_api_keys(ServerConfig(api_key_file=str(path)), {})


def test_the_admin_key_is_of_the_flag_or_the_environment() -> None:
    environment = {ADMIN_VARIABLE: "theirs"}
    assert read_admin_key(ServerConfig(), {}) is None
    assert read_admin_key(ServerConfig(), environment) == "theirs"
    config = from_flags(["--admin-api-key", " mine "])
    assert read_admin_key(config, environment, ["another"]) == "mine"


@pytest.mark.parametrize(("key", "says"), [("", "is empty"), ("client", "clients must not have")])
def test_an_admin_key_that_protects_nothing_is_refused(key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_admin_key(ServerConfig(admin_api_key=key), {}, ["client"])
