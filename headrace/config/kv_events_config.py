"""`--kv-events-config`: JSON as vLLM takes it, of where events of the KV cache are published."""

import msgspec

from headrace.errors import BAD_JSON, ConfigError

FLAG = "--kv-events-config"
EXAMPLE = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'


class KvEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a ZeroMQ socket publishes, and how many messages wait for a slow subscriber."""

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    topic: str = ""
    hwm: int = 100_000


def parse_kv_events(text: str | None) -> KvEventsConfig | None:
    """Return the config; None where no events are wanted.

    Raises:
        ConfigError: it is no such JSON, or asks for another publisher.
    """
    if text is None:
        return None
    try:
        config = msgspec.json.decode(text, type=KvEventsConfig)
    except BAD_JSON as error:
        raise ConfigError(f"{FLAG} {text}: {error}; write it as {EXAMPLE}") from None
    if config.publisher != "zmq" or config.hwm < 1:
        raise ConfigError(
            f"{FLAG} {text}: publisher must be zmq and hwm at least 1; write it as {EXAMPLE}"
        )
    return config if config.enable_kv_cache_events else None
