"""What litellm and langchain-openai send is taken: bodies recorded from `make ecosystem`.

They want another version of the openai package than our tests, and 300 MB. What comes back is read
with that package, whose own client is in the system tests.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from planners import HTTP, make_planner
from weather_tool import TEMPLATE

from headrace.model.output_formats import ToolFormat

RECORDED = Path(__file__).parent / "recorded" / "clients.jsonl"
KINDS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
    "/v1/embeddings": "embedding",
}
REQUESTS = [json.loads(line) for line in RECORDED.read_text().splitlines()]


@pytest.mark.parametrize("recorded", REQUESTS, ids=lambda one: f"{one['client']} {one['path']}")
def test_a_recorded_request_is_planned(recorded: Any) -> None:
    kind, body = KINDS[recorded["path"]], recorded["body"]
    planner = make_planner(
        max_model_len=4000,
        chat_template=TEMPLATE,
        tool_format=ToolFormat.HERMES,
        embeds=kind == "embedding",
    )
    (request,) = planner.plan(kind, HTTP, json.dumps(body | {"model": "tiny"}).encode()).requests
    demanded = body.get("tool_choice") not in (None, "none", {"type": "none"})
    assert bool(request.grammar) == (demanded or "response_format" in body)


def test_both_clients_have_used_all_that_there_is_for_them() -> None:
    assert {one["client"] for one in REQUESTS} == {"litellm", "langchain-openai"}
    assert {one["path"] for one in REQUESTS} == KINDS.keys()
