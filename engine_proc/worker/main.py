"""Worker process: runs the model on the steps it is given; decides nothing.
In: ToWorker (engine_proc).  Out: FromWorker (engine_proc)."""

import os
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from headrace.board.admin_requests import PROFILE, AdminRequests
from headrace.board.fields import CommonField, WorkerField
from headrace.config.process_configs import WorkerConfig
from headrace.engine_proc.collectives.control_page import ControlPage
from headrace.engine_proc.collectives.shm_all_reduce import ShmAllReduce
from headrace.engine_proc.shm.embedding_area import EmbeddingArea
from headrace.engine_proc.shm.grammar_bitmask import GrammarBitmask
from headrace.engine_proc.shm.step_channel import StepChannel
from headrace.engine_proc.worker.execution.cpu_sampler import Masks
from headrace.engine_proc.worker.execution.executor import Floats
from headrace.engine_proc.worker.execution.loaded_model import PAGE_TOKENS
from headrace.engine_proc.worker.loader import load
from headrace.engine_proc.worker.profiler import Profiler
from headrace.engine_proc.worker.result_sender import ResultSender
from headrace.engine_proc.worker.step_inbox import StepInbox
from headrace.engine_proc.worker.step_runner import StepRunner
from headrace.ipc.worker_messages import FromWorker, Rest, Resume, Step, ToWorker, WorkerReady
from headrace.runtime.process import Context
from headrace.system.malloc import give_back

REMOTE = "headrace.engine_proc.stages.seat:main"  # by name: a worker here loads nothing of it
IDLE_S = 0.5
# While a GPU computes, the worker looks for the next step and sleeps, for as long as these in turn.
# Between them it asks whether the GPU is done.
POLL_INTERVAL_S = 5e-5
POLL_LOOK_US = 20
LOOK_US = 200  # for the next step: an engine that has work sends it within that time


def main(config: WorkerConfig, context: Context) -> None:
    """Load the model, then execute steps until SIGTERM. Or do so by another machine's worker.

    Raises:
        CollectiveFailed: another worker is lost.
    """
    if config.remote is not None:
        pkgutil.resolve_name(REMOTE)(config, context)
    with ending_waits(config.control_fd):
        work(config, context)


@contextmanager
def ending_waits(control_fd: int | None) -> Iterator[None]:
    """A context that ends what other workers' GPUs wait for, if this worker fails in it.

    The engine does so, too, when the process has ended. That may wait for kernels, which wait for
    each other.
    """
    try:
        yield
    except BaseException:
        if control_fd is not None:
            ControlPage(control_fd).abort()
        raise


def work(config: WorkerConfig, context: Context) -> None:
    """Do as `main`, and leave the others as they are."""
    steps: StepChannel[ToWorker] = StepChannel(config.step_fd, ToWorker, LOOK_US)
    results: StepChannel[FromWorker] = StepChannel(config.result_fd, FromWorker)
    area = GrammarBitmask(config.mask_fd, config.execution.vocab_size)

    def progress(done: int, total: int) -> None:
        context.slot[CommonField.PROGRESS] = 1000 * done // max(total, 1)

    def masks_of(num_rows: int) -> Masks:
        answers.flush()  # what it has is in the masks
        inbox.wait_for_masks(IDLE_S)
        masks = np.frombuffer(area.buffer, np.uint32, num_rows * area.num_words)
        return masks.reshape(num_rows, area.num_words)

    heartbeat = context.keep_beating()  # a step may be long
    heartbeat.begin(context.progress)
    group = join(config, config.rank)
    loaded = load(config, progress, group, embeddings(config))
    inbox = StepInbox(steps, loaded.adapters, loaded.copier, results.send)
    can_rejoin = group if loaded.can_rejoin else None
    is_alone = config.execution.tp == 1
    attempts = StepRunner(loaded.runner, can_rejoin, is_alone, loaded.links)
    answers = ResultSender(results.send)
    admin_requests = AdminRequests(context.board, PROFILE)
    profiles = Profiler(config.execution.profile_dir, f"worker-{context.index}", admin_requests)
    heartbeat.end()
    context.slot[WorkerField.ADAPTER_BYTES] = loaded.adapter_bytes
    context.ready()
    results.send(
        WorkerReady(
            loaded.num_pages,
            PAGE_TOKENS,
            loaded.whole_prompts,
            loaded.looks_ahead,
            loaded.num_states,
            loaded.cache_id,
            loaded.page_bytes,
            loaded.state_bytes,
            loaded.num_host_pages,
            loaded.num_host_states,
            loaded.numerics,
            loaded.eagle_bytes,
            loaded.hidden_size,
            gpu_name(config),
        )
    )
    while True:
        wait_s, look_us = (POLL_INTERVAL_S, POLL_LOOK_US) if answers.is_open else (IDLE_S, LOOK_US)
        step = inbox.receive(wait_s, look_us)
        profiles.look()
        if isinstance(step, Resume):
            attempts.resume()
        elif isinstance(step, Rest):
            loaded.rest()
            give_back()
        elif isinstance(step, Step):  # masks are those of a step that has failed
            heartbeat.begin()
            profiles.began()
            answers.add(attempts.run(step, masks_of))
            context.slot.add(WorkerField.COMPUTED_STEPS)
            profiles.took(step.num_tokens)
        elif answers.is_due:
            answers.flush()
        if not answers.is_open:
            heartbeat.end()


def embeddings(config: WorkerConfig) -> Floats | None:
    """Return the rows of images, of a model that takes some."""
    if config.embedding_fd is None:
        return None
    return EmbeddingArea(config.embedding_fd, config.execution.image_row_size).rows


def join(config: WorkerConfig, rank: int) -> ShmAllReduce | None:
    """Meet the workers that have the other shares of the model, if there are any."""
    if config.group_fd is None:
        return None
    group = ShmAllReduce(config.group_fd, rank, config.execution.tp)
    os.close(config.group_fd)
    return group


def gpu_name(config: WorkerConfig) -> str:
    """Return the name of the GPU that this process computes on; none on CPUs."""
    torch: Any = sys.modules.get("torch")  # it has been loaded where a GPU computes
    if torch is None or not torch.cuda.is_initialized():
        return ""
    return str(torch.cuda.get_device_name(config.rank if config.execution.tp > 1 else 0))
