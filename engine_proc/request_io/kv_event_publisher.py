"""Publishes events of the KV cache on ZeroMQ as vLLM does: topic, number and MessagePack."""

import time
from collections.abc import Callable

import msgspec
import zmq

from headrace.config.kv_events_config import FLAG, KvEventsConfig
from headrace.engine_proc.kv_cache.kv_event_log import KvEvent, KvEventLog
from headrace.errors import ConfigError


class KvEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The events of a message. `ts` is in seconds since 1970."""

    ts: float
    events: list[KvEvent]


class KvEventPublisher:
    """A socket that never waits: a slow subscriber loses messages, which their numbers tell.

    Without a config and a log there is nothing to publish.

    Raises:
        ConfigError: the endpoint cannot be bound.
    """

    def __init__(
        self,
        config: KvEventsConfig | None = None,
        log: KvEventLog | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._log = log
        self._clock = clock
        self._number = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._topic = b"" if config is None else config.topic.encode()
        self._socket = None if config is None else bind(config)

    def publish(self) -> None:
        """Send the events since the last call, if there are any."""
        events = self._log.take() if self._log is not None else []
        if events and self._socket is not None:
            batch = self._encoder.encode(KvEventBatch(self._clock(), events))
            self._socket.send_multipart([self._topic, self._number.to_bytes(8, "big"), batch])
            self._number += 1

    def close(self) -> None:
        """Unbind the endpoint."""
        if self._socket is not None:
            self._socket.close()


def bind(config: KvEventsConfig) -> "zmq.Socket[bytes]":
    """Return a socket that publishes."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
    socket.set_hwm(config.hwm)
    socket.linger = 0
    try:
        socket.bind(config.endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"{FLAG}: {config.endpoint} cannot be bound: {error}") from None
    return socket
