"""Placement process: has Ray start engines or stages on nodes, and others where they have ended.
In: nothing.  Out: the address of each of them, a file (headrace.runtime.placed_address.py)."""

import contextlib
import os
import time
from functools import partial
from typing import NoReturn

from headrace.board.fields import PlacementField
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
        engines = [
            PlacedEngine(
                name,
                cluster,
                address.write,
                partial(is_ready, context.board.slot(*config.seats[name])),
            )
            for name, address in addresses.items()
        ]
        while True:
            heartbeat.begin()
            for engine in engines:
                engine.look(time.monotonic())
            context.slot[PlacementField.PLACED] = sum(engine.is_placed for engine in engines)
            cluster.wait(LOOK_S)
    finally:
        cluster.close()
