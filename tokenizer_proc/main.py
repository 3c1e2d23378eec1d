"""Tokenizer process: request bodies in, token ids out; answers early what needs no engine.
In: ToTokenizer (frontend).  Out: ToEngine (engine_proc), ToFrontend (early answers)."""

import time

import msgspec

from headrace.board import Field, State
from headrace.config import TokenizerConfig
from headrace.messages import Head, HttpRequest, ResponseFrames, Times, ToTokenizer, frontend_of
from headrace.process import Context
from headrace.sockets import Inbox, Outbox, address
from headrace.tokenizer_proc.encode import Encoder
from headrace.tokenizer_proc.generation import GenerationPlanner, Sequences
from headrace.tokenizer_proc.routes import Answer, Routes

IDLE_MS = 500


def main(config: TokenizerConfig, context: Context) -> None:
    """Handle requests one after the other until SIGTERM."""
    slot = context.slot
    encoder = Encoder(config.card.path)
    planner = GenerationPlanner(config.card, encoder, config.num_detokenizers, config.seed)
    routes = Routes(config, context.board, planner)
    inbox: Inbox[ToTokenizer] = Inbox(
        address(config.run_dir, "tokenizer", context.index), ToTokenizer
    )
    engine = Outbox(address(config.run_dir, "engine"))
    frontends = [
        Outbox(address(config.run_dir, "frontend", i)) for i in range(config.num_frontends)
    ]
    slot.enter(State.READY)
    while True:
        slot.beat()
        received = inbox.receive(IDLE_MS)
        if received is None:
            continue
        request, body = received
        begun = time.monotonic_ns()
        match outcome := routes.handle(request, body):
            case Answer():
                slot.add(Field.REFUSED, outcome.status >= 400)
                send_answer(frontends[frontend_of(request.id)], request, outcome)
            case Sequences(requests, prompts):
                now = time.monotonic_ns()
                times = Times(begun, now, now)
                for generate, prompt in zip(requests, prompts, strict=True):
                    slot.add(Field.PROMPT_TOKENS, len(prompt))
                    engine.send(msgspec.structs.replace(generate, times=times), memoryview(prompt))
        slot.add(Field.HANDLED)
        slot.add(Field.HANDLED_BYTES, len(body) + 1)


def send_answer(frontend: Outbox, request: HttpRequest, answer: Answer) -> None:
    """Send a response that is complete."""
    head = Head(answer.status, answer.content_type)
    frames = ResponseFrames({request.id: head}, [request.id], [len(answer.body)], [True])
    frontend.send(frames, answer.body)
