"""Which renderer writes a reply."""

from typing import assert_never

from headrace.detokenizer_proc.openai_renderer import OpenAIRenderer
from headrace.detokenizer_proc.renderer import Renderer
from headrace.messages import Api, ReplyPlan


def renderer_of(plan: ReplyPlan) -> Renderer:
    """Return the renderer of the API in which a request came."""
    match plan.api:
        case Api.CHAT | Api.COMPLETION:
            return OpenAIRenderer(plan)
        case _:
            assert_never(plan.api)
