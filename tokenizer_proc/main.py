"""Tokenizer process: request bodies in, token ids out; answers early what needs no engine.
In: ToTokenizer, Abort (frontend).  Out: ToEngine (engine_proc), ToFrontend (early answers)."""

import os
from typing import TYPE_CHECKING

from headrace.board.backlog import tokenizer_backlog
from headrace.config.process_configs import TokenizerConfig
from headrace.ipc.messages import ToTokenizer
from headrace.ipc.sockets import HIGH_WATER, Inbox, address
from headrace.runtime.process import Context
from headrace.system.cpu_scheduling import take_long_turns, take_turns
from headrace.system.machine import usable_cores
from headrace.system.malloc import give_back, keep_freed
from headrace.tokenizer_proc.fast_loader import FastLoader
from headrace.tokenizer_proc.jobs.aborts import Aborts

if TYPE_CHECKING:
    from headrace.tokenizer_proc.service import LoadImages, Service

IDLE_MS = 500
LONG_HIGH_WATER = 8  # long bodies that wait here; the others wait where they came from
IMAGE_HIGH_WATER = 2
NICENESS = 5  # of a process that encodes or prepares images
LONG_NICENESS = 5  # more than that
MAX_THREADS = 8


def main(config: TokenizerConfig, context: Context) -> None:
    """Handle requests until SIGTERM."""
    tokenizer_backlog(context.board, context.index).settle()
    last = len(list(context.board.of("tokenizer"))) - 1
    is_about = config.handles_gets and context.index == last
    if not is_about:
        os.nice(NICENESS)
        take_turns(is_urgent=False)
    if context.index < config.num_tokenizers:
        serve, high_water = serve_short, HIGH_WATER
    elif is_about:
        serve, high_water = serve_about, HIGH_WATER
    elif context.index == config.num_tokenizers:
        serve, high_water = serve_long, LONG_HIGH_WATER
    else:
        serve, high_water = serve_images, IMAGE_HIGH_WATER
    where = address(config.run_dir, "tokenizer", context.index)
    inbox: Inbox[ToTokenizer] = Inbox(where, ToTokenizer, high_water, context.tee)
    serve(config, context, inbox, Aborts(config.run_dir, context.index))


def serve_short(
    config: TokenizerConfig, context: Context, inbox: Inbox[ToTokenizer], aborts: Aborts
) -> None:
    """Handle requests in batches."""
    wait_s = config.batch_wait_ms / 1000
    service = load_service(config, context, inbox, aborts, 1, config.max_batch_size, wait_s)
    context.ready()
    loader = FastLoader(service.load_fast, context.board)
    while True:
        context.slot.beat()
        loader.poll(service.handle(IDLE_MS))


def serve_about(
    config: TokenizerConfig, context: Context, inbox: Inbox[ToTokenizer], aborts: Aborts
) -> None:
    """Answer GETs, and watch the ring.

    It has little to do, and a core at once where tokenizers have all of them.
    """
    from headrace.tokenizer_proc.info_lane import InfoLane

    lane = InfoLane(config, context, inbox, aborts)
    context.ready()
    while True:
        context.slot.beat()
        lane.handle()


def serve_long(
    config: TokenizerConfig, context: Context, inbox: Inbox[ToTokenizer], aborts: Aborts
) -> None:
    """Handle long requests one by one. The tokenizer is loaded with the first one."""
    os.nice(LONG_NICENESS)
    heartbeat = context.keep_beating()
    context.ready()
    while not inbox.wait(IDLE_MS):
        pass
    service = load_service(config, context, inbox, aborts, num_threads(), 1, 0)
    loader = FastLoader(service.load_fast, context.board)
    was_busy = False
    while True:
        heartbeat.begin()
        is_busy = service.handle(IDLE_MS)
        loader.poll(is_busy)
        heartbeat.end()
        if was_busy and not is_busy:
            give_back()
        was_busy = is_busy


def serve_images(
    config: TokenizerConfig, context: Context, inbox: Inbox[ToTokenizer], aborts: Aborts
) -> None:
    """Handle requests with images one by one."""
    from headrace.tokenizer_proc.images.lane import load_images

    os.nice(LONG_NICENESS)
    take_long_turns()
    heartbeat = context.keep_beating()
    heartbeat.begin(context.progress)
    service = load_service(config, context, inbox, aborts, num_threads(), 1, 0, load_images)
    heartbeat.end()
    context.ready()
    service.load_fast()
    keep_freed()
    was_busy = False
    while True:
        heartbeat.begin()
        is_busy = service.handle(IDLE_MS)
        heartbeat.end()
        service.show_images()
        if was_busy and not is_busy:
            give_back()
        was_busy = is_busy


def load_service(
    config: TokenizerConfig,
    context: Context,
    inbox: Inbox[ToTokenizer],
    aborts: Aborts,
    num_fast_threads: int,
    max_batch_size: int,
    max_wait_s: float,
    load_images: "LoadImages | None" = None,
) -> "Service":
    """Import and load all that handling requests takes."""
    # `fastokens` divides a batch among threads that spin: for short texts that costs twice the
    # time and saves none. `tokenizers` (Rayon) loses nothing by it.
    os.environ.setdefault("FASTOKENS_BPE_THREADS", str(num_fast_threads))
    os.environ.setdefault("RAYON_NUM_THREADS", str(num_threads()))
    from headrace.tokenizer_proc.service import Service

    return Service(config, context, inbox, aborts, max_batch_size, max_wait_s, load_images)


def num_threads() -> int:
    """Return how many threads of the libraries there may be at most."""
    return min(MAX_THREADS, usable_cores())
