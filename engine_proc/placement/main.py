"""Placement process: has Ray start engines or stages on nodes, and others where they have ended.
In: nothing.  Out: the address of each of them, a file (headrace.runtime.placed_address.py)."""

import contextlib
import os
import time
from functools import partial
from typing import NoReturn

from headrace.board.board import Slot, State
from headrace.board.fields import CommonField, EngineField, PlacementField, Seating
from headrace.board.replacements import is_ready
from headrace.config.process_configs import PlacementConfig
from headrace.engine_proc.placement.placed_engine import PlacedEngine
from headrace.ipc.curve_key import read_key
from headrace.runtime.placed_address import PlacedAddress
from headrace.runtime.process import Context

LOOK_S = 0.5
OF_RAY = {"RAY_NUM_REDIS_GET_RETRIES": "1"}  # attempts to reach a cluster, 40 s each


def main(config: PlacementConfig, context: Context) -> NoReturn:
    """Place engines, or stages, until SIGTERM. They end with this process."""
    with contextlib.redirect_stdout(None):  # where Ray prints what nodes tell
        place(config, context)


def place(config: PlacementConfig, context: Context) -> NoReturn:
    """Join the cluster and keep engines there, without end."""
    heartbeat = context.keep_beating()
    heartbeat.begin()
    for name, value in OF_RAY.items():
        os.environ.setdefault(name, value)
    from headrace.engine_proc.placement.ray_cluster import RayCluster  # after the first beat

    addresses = {name: PlacedAddress(config.run_dir, name) for name in config.seats}
    for address in addresses.values():
        address.write(None)  # engines of a predecessor have ended with it
    cluster = RayCluster(config, read_key(config.key_file))
    try:
        context.ready()
        slots = {name: context.board.slot(*seat) for name, seat in config.seats.items()}
        engines = {
            name: PlacedEngine(name, cluster, address.write, partial(is_ready, slots[name]))
            for name, address in addresses.items()
        }
        while True:
            heartbeat.begin()
            for name, engine in engines.items():
                tend(engine, slots[name], addresses[name])
            num_placed = sum(engine.is_placed for engine in engines.values())
            context.slot[PlacementField.PLACED] = num_placed
            cluster.wait(LOOK_S)
    finally:
        cluster.close()


def tend(engine: PlacedEngine, slot: Slot, address: PlacedAddress) -> None:
    """Have an engine placed, or leave. One that is withdrawn ends for another in its room."""
    if not is_wanted(slot):
        engine.leave()
    elif engine.is_placed and address.read() is None:
        engine.renew()
    else:
        engine.look(time.monotonic())


def is_wanted(slot: Slot) -> bool:
    """Whether something is to be placed for a seat: operators have engines come and go."""
    if slot.seat.role != "engine" or slot[EngineField.SEATING] != Seating.VACANT:
        return True
    return slot[CommonField.STATE] != State.ABSENT  # it ends its last requests, or is renewed
