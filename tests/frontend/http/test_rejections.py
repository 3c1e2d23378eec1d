"""Errors of the frontend, in the shape of the API whose path it is."""

import json

import pytest

from headrace.frontend.http.rejections import UNAUTHORIZED, error_body

TOLD = UNAUTHORIZED.message
OPENAI = {"error": {"message": TOLD, "type": UNAUTHORIZED.type, "param": None}}
JINA = OPENAI | {"detail": TOLD}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"type": "error", "error": {"type": UNAUTHORIZED.type, "message": TOLD}}),
        *((path, {"message": TOLD}) for path in ("/v1/embed", "/v2/embed", "/v2/rerank")),
        *((path, JINA) for path in ("/v1/embeddings", "/v1/rerank", "/rerank")),
        *((path, OPENAI) for path in ("/v1/score", "/nowhere", "")),
    ],
)
def test_rejections_have_the_shape_of_their_api(path: str, body: dict[str, object]) -> None:
    told = json.loads(error_body(UNAUTHORIZED, path))
    told.get("error", {}).pop("code", None)
    assert told == body
