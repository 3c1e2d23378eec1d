"""The flags of an engine that is placed on another machine: those of the server that it heeds."""

import os
from typing import Any

from headrace.config.config import ServerConfig
from headrace.config.model_configs import OF_MODEL

OF_SERVER = (
    "engine",
    "mock_profile",
    "frontend_procs",
    "detokenizer_procs",
    "kv_store",
    "kv_store_bytes",
    "kv_store_disk_bytes",
    "watchdog_timeout",
    "log_level",
)
PATHS = ("model", "draft_model", "chat_template", "kv_store", "mock_profile")
OF_PLACE = ("device", "data_parallel_size")  # which the placement decides


def node_flags(config: ServerConfig, on_gpus: bool) -> dict[str, Any]:
    """Return the values of a file for `--config` there.

    All are given, since defaults suit the machine that reads them. A relative path means the same
    there as here.
    """
    flags = {name: getattr(config, name) for name in (*OF_MODEL, *OF_SERVER)}
    flags = {name: v for name, v in flags.items() if v not in (None, ()) and name not in OF_PLACE}
    paths = {
        name: os.path.abspath(flags[name])
        for name in PATHS
        if name in flags and (name == "kv_store" or os.path.exists(flags[name]))
    }
    return {**flags, **paths, "device": "cuda" if on_gpus else "cpu"}
