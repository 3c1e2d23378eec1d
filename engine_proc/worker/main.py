"""Worker process: runs the model on the steps it is given; decides nothing.
In: ToWorker (engine_proc).  Out: FromWorker (engine_proc)."""

import logging
import os
import sys

import numpy as np

from headrace.board import Field
from headrace.config import WorkerConfig
from headrace.engine_proc.collectives import CollectiveFailed
from headrace.engine_proc.embedding_area import EmbeddingArea
from headrace.engine_proc.mask_area import MaskArea
from headrace.engine_proc.shm_all_reduce import ShmAllReduce
from headrace.engine_proc.step_channel import StepChannel
from headrace.engine_proc.worker.attempts import TOKEN_BYTES, Attempts
from headrace.engine_proc.worker.loader import PAGE_TOKENS, load
from headrace.engine_proc.worker.profiles import Profiles
from headrace.engine_proc.worker.sampler import Masks
from headrace.exit_status import ExitStatus
from headrace.messages import FromWorker, Resume, Step, ToWorker, WorkerReady
from headrace.process import Context
from headrace.wishes import PROFILE, Wishes

IDLE_S = 0.5
LOOK_US = 200  # for the next step: an engine that has work sends it within that time

log = logging.getLogger(__name__)


def main(config: WorkerConfig, context: Context) -> None:
    """Load the model, then execute steps until SIGTERM, or until another worker is lost."""
    steps: StepChannel[ToWorker] = StepChannel(config.step_fd, ToWorker, LOOK_US)
    results: StepChannel[FromWorker] = StepChannel(config.result_fd, FromWorker)
    area = MaskArea(config.mask_fd, config.vocab_size)

    def progress(done: int, total: int) -> None:
        context.slot[Field.PROGRESS] = 1000 * done // max(total, 1)

    def masks_of(num_rows: int) -> Masks:
        while steps.receive(IDLE_S) is None:
            pass
        masks = np.frombuffer(area.buffer, np.uint32, num_rows * area.num_words)
        return masks.reshape(num_rows, area.num_words)

    embeds = None
    if config.embedding_fd is not None:
        embeds = EmbeddingArea(config.embedding_fd, config.image_row_size).rows
    heart = context.keep_beating()  # a step may be long
    heart.begin(context.progress)
    group = join(config, context.index)
    loaded = load(config, progress, group, embeds)
    attempts = Attempts(loaded.runner, group, is_alone=config.num_ranks == 1)
    wishes = Wishes(context.board, PROFILE)
    profiles = Profiles(config.profile_dir, f"worker-{context.index}", wishes)
    heart.end()
    context.ready()
    results.send(
        WorkerReady(loaded.num_pages, PAGE_TOKENS, loaded.whole_prompts, loaded.looks_ahead)
    )
    while True:
        step = steps.receive(IDLE_S)
        profiles.look()
        if isinstance(step, Resume):
            attempts.resume()
        elif isinstance(step, Step):  # masks are those of a step that has failed
            try:
                heart.begin()
                profiles.began()
                results.send(attempts.run(step, masks_of))
                profiles.took(len(step.token_ids) // TOKEN_BYTES)
                heart.end()
            except CollectiveFailed as failure:
                context.slot.last_words = str(failure)
                log.warning("cannot go on: %s", failure)
                sys.exit(ExitStatus.PEER_LOST)


def join(config: WorkerConfig, rank: int) -> ShmAllReduce | None:
    """Meet the workers that have the other shares of the model, if there are any."""
    if config.group_fd is None:
        return None
    group = ShmAllReduce(config.group_fd, rank, config.num_ranks)
    os.close(config.group_fd)
    return group
