"""Detokenizer process: token ids in, ready-to-write HTTP bytes out.
In: ToDetokenizer (engine_proc).  Out: ToFrontend, ToEngine (stop strings)."""

from headrace.backlog import detokenizer_backlog
from headrace.board import Field
from headrace.config import DetokenizerConfig
from headrace.cpu_limit import CpuLimit
from headrace.detokenizer_proc.replies import Replies
from headrace.detokenizer_proc.text import load_vocabulary
from headrace.frontend_links import FrontendLinks
from headrace.messages import ToDetokenizer
from headrace.process import Context
from headrace.sockets import STEP_HIGH_WATER, Inbox, Outbox, address
from headrace.watch import Watch

IDLE_MS = 500
MAX_STEPS = 64  # taken together
MAX_BEHIND = 2  # messages that a frontend has not handled; it gets no more until it has
PARSER_CPU_S = 0.5  # for what one step brings of a sequence; that is 10 us for most
LOOK_MS = 1  # between looks at a frontend that is behind


def main(config: DetokenizerConfig, context: Context) -> None:
    """Render what the engine generates, one message per step and frontend, until SIGTERM.

    What comes while this process or a frontend is behind is rendered together: there is more text
    in fewer pieces then, and who was behind catches up.
    """
    slot = context.slot
    vocabulary = load_vocabulary(config.card.path)
    limit = CpuLimit(PARSER_CPU_S)

    def make_replies() -> Replies:
        return Replies(vocabulary, config.num_frontends, config.stream_interval, limit)

    replies = make_replies()
    inbox: Inbox[ToDetokenizer] = Inbox(
        address(config.run_dir, "detokenizer", context.index), ToDetokenizer, STEP_HIGH_WATER
    )
    engine = Outbox(address(config.run_dir, "engine"), on_wait=slot.beat)
    frontends = FrontendLinks(config.run_dir, config.num_frontends, context.board, slot)
    is_holding = False
    engines = Watch(context.board, ("engine",))
    backlog = detokenizer_backlog(context.board, context.index)
    backlog.settle()
    context.ready()
    while True:
        slot.beat()
        received = inbox.receive(LOOK_MS if is_holding else IDLE_MS)
        num_steps = 0
        if engines.replaced():  # the new one knows nothing of these; they are asked for again
            replies = make_replies()
        while received is not None:
            output, tokens = received
            replies.feed(output, tokens)
            slot.add(Field.TOKENS, len(tokens) // 4)
            num_steps += 1
            received = inbox.receive(0) if num_steps < MAX_STEPS else None
        if not num_steps and not is_holding:
            backlog.settle()
            continue
        for stop in replies.stops():
            engine.send(stop)
        is_holding = False
        for frontend in range(len(frontends)):
            if frontends.backlog(frontend) >= MAX_BEHIND:
                is_holding = True
                continue
            frames = replies.render(frontend)
            if frames is not None:
                frontends.send(frontend, frames.message(), frames.data())
                slot.add(Field.FRAMES)
        slot.add(Field.MESSAGES_TAKEN, num_steps)
        slot[Field.OPEN_REPLIES] = len(replies)
