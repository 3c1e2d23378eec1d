"""What the board tells of an engine: the state of its scheduler, its pages and its images."""

from headrace.board.board import Slot
from headrace.board.fields import EngineField
from headrace.engine_proc.images.encoder_queue import EncoderQueue
from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.scheduling.scheduler import Scheduler


def write_counts(
    slot: Slot, scheduler: Scheduler, pool: PagePool, images: EncoderQueue | None
) -> None:
    """Bring the board up to date.

    Args:
        images: None where the model takes none.
    """
    slot[EngineField.RUNNING] = len(scheduler.running)
    slot[EngineField.WAITING] = len(scheduler.waiting)
    slot[EngineField.WAITING_TOKENS] = scheduler.waiting.num_tokens
    slot[EngineField.PAGES_TOTAL] = pool.num_pages
    slot[EngineField.PAGES_FREE] = pool.num_free
    slot[EngineField.STATES_TOTAL] = scheduler.slots.num_slots
    slot[EngineField.STATES_FREE] = scheduler.slots.num_free
    counts = scheduler.counts
    slot[EngineField.STEPS] = counts.steps
    slot[EngineField.STEPS_AHEAD] = counts.steps_ahead
    slot[EngineField.PREEMPTIONS] = counts.preemptions
    slot[EngineField.PREFIX_QUERIES] = counts.prefix_queries
    slot[EngineField.PREFIX_HITS] = counts.prefix_hits
    if images is not None:
        embeddings = images.pool
        slot[EngineField.WAITING_IMAGES] = images.num_waiting
        slot[EngineField.EMBEDDING_QUERIES] = images.num_queries
        slot[EngineField.EMBEDDING_HITS] = images.num_hits
        slot[EngineField.EMBEDDING_ROWS] = embeddings.num_rows
        slot[EngineField.EMBEDDING_ROWS_FREE] = embeddings.num_free
    slot[EngineField.DRAFTS] = counts.drafts
    slot[EngineField.RIGHT_DRAFTS] = counts.accepted_drafts
    slot[EngineField.DRAFT_ROUNDS] = counts.draft_rounds
    if counts.accepted_drafts:
        for place, num_right in enumerate(counts.right_at):
            slot[EngineField.RIGHT_AT + place] = num_right
