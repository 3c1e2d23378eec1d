"""Selects the renderer of a response."""

import time
from typing import assert_never

from headrace.detokenizer_proc.renderers.anthropic import MessagesRenderer
from headrace.detokenizer_proc.renderers.openai import OpenAIRenderer
from headrace.detokenizer_proc.renderers.renderer import Renderer
from headrace.detokenizer_proc.renderers.responses import ResponsesRenderer
from headrace.detokenizer_proc.renderers.scripted_faults import FaultyRenderer
from headrace.detokenizer_proc.renderers.sglang import GenerateRenderer
from headrace.ipc.messages import Api, ResponsePlan


def renderer_of(plan: ResponsePlan) -> Renderer:
    """Return the renderer of the API in which a request came, with the fault of a script."""
    renderer = api_renderer(plan)
    return renderer if plan.fault is None else FaultyRenderer(renderer, plan.fault)


def api_renderer(plan: ResponsePlan) -> Renderer:
    """Return the renderer of the API in which a request came."""
    match plan.api:
        case Api.CHAT | Api.COMPLETION:
            return OpenAIRenderer(plan)
        case Api.RESPONSES:
            return ResponsesRenderer(plan)
        case Api.MESSAGES:
            return MessagesRenderer(plan)
        case Api.GENERATE:
            return GenerateRenderer(plan, time.time)
        case _:
            assert_never(plan.api)
