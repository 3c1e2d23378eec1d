"""Vision process: pixels of images in, rows that decoders take out; keeps nothing of either.
In: ToVision (engine_proc).  Out: FromVision (engine_proc)."""

from headrace.arena import Arena
from headrace.board import Field
from headrace.config import VisionConfig
from headrace.engine_proc.embedding_area import EmbeddingArea
from headrace.engine_proc.step_channel import StepChannel
from headrace.engine_proc.vision.encoding import encode
from headrace.heap import give_back, keep_freed
from headrace.messages import FromVision, ToVision
from headrace.process import Context

IDLE_S = 0.5


def main(config: VisionConfig, context: Context) -> None:
    """Load the tower, then encode images until SIGTERM."""
    asks: StepChannel[ToVision] = StepChannel(config.ask_fd, ToVision)
    answers: StepChannel[FromVision] = StepChannel(config.answer_fd, FromVision)
    arena = Arena(config.arena_fd, config.num_arena_regions)
    area = EmbeddingArea(config.embedding_fd, config.image_row_size)
    heart = context.keep_beating()  # a batch may be long
    heart.begin(context.progress)
    from headrace.engine_proc.vision.tower import Tower  # and torch

    tower = Tower(config.model_path)
    heart.end()
    context.ready()
    keep_freed()
    was_busy = False
    while True:
        message = asks.receive(IDLE_S)
        if was_busy and message is None:
            give_back()
        was_busy = message is not None
        if message is not None:
            heart.begin()
            answer = encode(message, tower, arena, area.rows)
            heart.end()
            num_lost = len(answer.gone) + len(answer.failed)
            context.slot.add(Field.ENCODED_IMAGES, len(message.images) - num_lost)
            answers.send(answer)
