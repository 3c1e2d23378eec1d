"""Events of the KV cache, as a subscriber of vLLM's reads them."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from scheduler_rig import Rig, make_sequence

from headrace.config.kv_events_config import KvEventsConfig, parse_kv_events
from headrace.engine_proc.kv_cache.kv_event_log import KvEventLog
from headrace.engine_proc.request_io.kv_event_publisher import KvEventPublisher
from headrace.errors import ConfigError

WAIT_MS = 60_000


def hear(subscriber: "zmq.Socket[bytes]") -> tuple[int, list[list[Any]]]:
    """Return the next message's number and events."""
    assert subscriber.poll(WAIT_MS)
    topic, number, payload = subscriber.recv_multipart()
    _, events = msgspec.msgpack.decode(payload)
    assert topic == b"kv"
    return int.from_bytes(number, "big"), events


def test_a_subscriber_learns_what_the_pool_has(tmp_path: Path) -> None:
    rig = Rig.make(num_pages=6, page_tokens=4, budget=32, max_num_seqs=2)
    log = rig.pool.events = KvEventLog(4)
    config = KvEventsConfig(True, endpoint=f"ipc://{tmp_path}/events", topic="kv")
    publisher = KvEventPublisher(config, log)
    subscriber: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    subscriber.connect(config.endpoint)
    subscriber.subscribe("kv")
    publisher.publish()
    while not subscriber.poll(10):  # the subscription takes a moment to arrive
        log.clear()
        publisher.publish()
    number, events = hear(subscriber)
    assert events == [["AllBlocksCleared"]]
    rig.add(make_sequence([1, 2, 3, 4, 5, 6, 7, 8, 9], 1))
    rig.run()
    publisher.publish()
    while events == [["AllBlocksCleared"]]:
        before = number
        number, events = hear(subscriber)
        assert number == before + 1
    first, second = list(rig.pool._pages)
    assert events == [
        ["BlockStored", [first], None, [1, 2, 3, 4], 4, None, "CPU"],
        ["BlockStored", [second], first, [5, 6, 7, 8], 4, None, "CPU"],
    ]
    rig.pool.free(rig.pool.allocate(6))
    publisher.publish()
    removed = [["BlockRemoved", [digest], "CPU"] for digest in (second, first)]
    assert hear(subscriber) == (number + 1, removed)
    subscriber.close()
    publisher.close()


def test_a_config_names_what_is_wrong_with_it() -> None:
    assert parse_kv_events(None) is None
    assert parse_kv_events('{"enable_kv_cache_events": false}') is None
    assert parse_kv_events('{"enable_kv_cache_events": true}') == KvEventsConfig(True)
    for text in ("{", '{"port": 1}', '{"publisher": "null"}', '{"hwm": 0}'):
        with pytest.raises(ConfigError, match="--kv-events-config"):
            parse_kv_events(text)


def test_an_endpoint_that_cannot_be_bound_is_named() -> None:
    config = KvEventsConfig(True, endpoint="tcp://256.0.0.1:x")
    with pytest.raises(ConfigError, match="cannot be bound"):
        KvEventPublisher(config, KvEventLog(4))
