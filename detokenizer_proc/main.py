"""Detokenizer process: token ids in, ready-to-write HTTP bytes out.
In: ToDetokenizer (engine_proc).  Out: ToFrontend, ToEngine (stop strings)."""

from headrace.board import Field
from headrace.config import DetokenizerConfig
from headrace.detokenizer_proc.replies import Replies
from headrace.detokenizer_proc.text import load_vocabulary
from headrace.messages import ToDetokenizer
from headrace.process import Context
from headrace.sockets import STEP_HIGH_WATER, Inbox, Outbox, address

IDLE_MS = 500
MAX_STEPS = 64  # rendered together when a frontend, or this process, is behind


def main(config: DetokenizerConfig, context: Context) -> None:
    """Render what the engine generates, one message per step and frontend, until SIGTERM.

    Steps that have come meanwhile are rendered as one: who is behind gets more text in fewer
    pieces, and catches up.
    """
    slot = context.slot
    vocabulary = load_vocabulary(config.card.path)
    replies = Replies(vocabulary, config.num_frontends, config.stream_interval)
    inbox: Inbox[ToDetokenizer] = Inbox(
        address(config.run_dir, "detokenizer", context.index), ToDetokenizer, STEP_HIGH_WATER
    )
    engine = Outbox(address(config.run_dir, "engine"))
    frontends = [
        Outbox(address(config.run_dir, "frontend", i), STEP_HIGH_WATER)
        for i in range(config.num_frontends)
    ]
    context.ready()
    while True:
        slot.beat()
        received = inbox.receive(IDLE_MS)
        num_steps = 0
        while received is not None:
            output, tokens = received
            replies.feed(output, tokens)
            slot.add(Field.TOKENS, sum(output.counts))
            num_steps += 1
            received = inbox.receive(0) if num_steps < MAX_STEPS else None
        if not num_steps:
            continue
        outgoing, stops = replies.render()
        for stop in stops:
            engine.send(stop)
        for frontend, frames in outgoing.items():
            frontends[frontend].send(frames.message(), frames.data())
        slot.add(Field.FRAMES, len(outgoing))
        slot[Field.OPEN_REPLIES] = len(replies)
