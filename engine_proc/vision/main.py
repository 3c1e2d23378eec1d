"""Vision process: pixels of images in, rows that decoders take out; with --kv-store, kept on disk.
In: ToVision (engine_proc).  Out: FromVision (engine_proc)."""

import logging
from pathlib import Path

from headrace.board.fields import VisionField
from headrace.config.process_configs import ExecutionConfig, VisionConfig
from headrace.engine_proc.shm.embedding_area import EmbeddingArea
from headrace.engine_proc.shm.step_channel import StepChannel
from headrace.engine_proc.vision.embedding_store import EmbeddingStore
from headrace.engine_proc.vision.encoder import ImageEncoder, encode
from headrace.engine_proc.vision.placement import placement_of, why_in_modules
from headrace.engine_proc.vision.siglip_tower import SiglipTower
from headrace.ipc.arena import Arena
from headrace.ipc.worker_messages import FromVision, ToVision, TowerReady
from headrace.runtime.process import Context
from headrace.system.malloc import give_back, keep_freed

IDLE_S = 0.5

log = logging.getLogger(__name__)


def main(config: VisionConfig, context: Context) -> None:
    """Load the tower, then encode images until SIGTERM."""
    asks: StepChannel[ToVision] = StepChannel(config.ask_fd, ToVision)
    answers: StepChannel[FromVision] = StepChannel(config.answer_fd, FromVision)
    arena = Arena(config.arena_fd, config.num_arena_regions)
    area = EmbeddingArea(config.embedding_fd, config.execution.image_row_size)
    heartbeat = context.keep_beating()  # a batch may be long
    heartbeat.begin(context.progress)
    tower, ready = open_tower(config.execution)
    heartbeat.end()
    context.ready()
    answers.send(ready)
    keep_freed()
    was_busy = False
    store: EmbeddingStore | None = None
    fingerprint = ""
    while True:
        message = asks.receive(IDLE_S)
        if was_busy and message is None:
            give_back()
        was_busy = message is not None
        if message is not None:
            heartbeat.begin()
            if message.fingerprint != fingerprint:  # the KV store is ready
                fingerprint = message.fingerprint
                store = open_store(config, fingerprint)
            answer = encode(message, tower, arena, area.rows, store)
            heartbeat.end()
            num_others = len(answer.gone) + len(answer.failed) + answer.num_stored
            num_encoded = len(message.images) - num_others
            context.slot.add(VisionField.ENCODER_BATCHES, answer.num_stored < len(message.images))
            context.slot.add(VisionField.ENCODED_IMAGES, num_encoded)
            context.slot.add(VisionField.STORE_HITS, answer.num_stored)
            answers.send(answer)


def open_store(config: VisionConfig, fingerprint: str) -> EmbeddingStore | None:
    """Open the files of embeddings; None where there is no directory, or no room."""
    tiers = config.store_tiers
    if tiers is None or tiers.directory is None:
        return None
    model, row_size = Path(config.execution.model_path).name, config.execution.image_row_size
    num_bytes = tiers.disk_bytes_of_images
    return EmbeddingStore.open(tiers.directory, num_bytes, fingerprint, model, row_size)


def open_tower(config: ExecutionConfig) -> tuple[ImageEncoder, TowerReady]:
    """Load the tower to where it runs: into the C++ core, or transformers' modules.

    Raises:
        ConfigError: the GPU has no room for it.
        ModelError: it cannot be loaded.
    """
    why = why_in_modules(config)
    if not why:
        return SiglipTower.open(config), TowerReady(max_numbers=0)  # more together gain nothing
    log.info("the vision tower runs in transformers' modules: %s", why)
    from headrace.engine_proc.vision.tower import Tower, load, load_mmproj, move_to_gpu  # and torch

    placement = placement_of(config)
    if config.mmproj is None:
        module = load(config.model_path, placement.dtype, config.load_format == "dummy")
    else:
        module = load_mmproj(config.mmproj, config.model_path, placement.dtype)
    gpu_bytes = 0
    if placement.call_bytes:
        gpu_bytes = move_to_gpu(module, placement.device, placement.call_bytes)
    return Tower(module, placement.device), TowerReady(placement.max_numbers, gpu_bytes)
