"""A local server for this process: on a free port, ended with this process."""

import os
from collections.abc import Mapping
from typing import Any

from headrace.config.api_keys import read_admin_key, read_api_keys
from headrace.config.config import ServerConfig, config_of
from headrace.errors import ConfigError
from headrace.launch.embedded import EmbeddedServer, RingReady
from headrace.system.cpu_share import num_nodes
from headrace.system.machine import has_gpus

DEFAULTS: dict[str, Any] = {"port": 0, "log_level": "warning"}


class LocalServer:
    """A ring with frontends, owned by this process and ended by `stop`."""

    def __init__(
        self,
        model: str | os.PathLike[str] | None,
        flags: Mapping[str, Any],
        log_fd: int | None = None,
    ) -> None:
        """Start it and wait until it serves.

        Args:
            log_fd: where its processes write their logs; None is standard error.
        Raises:
            ConfigError, ModelError: what a flag or the model's files have wrong, in one line.
            EngineDied: a process could not start; the text says which and why.
        """
        for name in flags:
            if name not in ServerConfig.__dataclass_fields__ or name == "uds":
                raise ConfigError(
                    f"{name} is not a flag of a local server; `launch_server --help` lists them"
                )
        config = config_of(DEFAULTS | dict(flags) | {"model": model}, has_gpus(), num_nodes())
        keys = read_api_keys(config, {})
        read_admin_key(config, {}, keys)
        self.api_key = keys[0] if keys else None
        self._server = EmbeddedServer(config, keys, log_fd)
        try:
            report = self._server.receive()
        except BaseException:
            self._server.stop()
            raise
        assert isinstance(report, RingReady)
        self.url = report.url

    def stop(self) -> None:
        """End it and leave nothing of it."""
        self._server.stop()
