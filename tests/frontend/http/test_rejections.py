"""Errors of the frontend, in the shape of the API whose path it is."""

import json

import pytest

from headrace.frontend.http.rejections import UNAUTHORIZED, error_body

TOLD = UNAUTHORIZED.message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"type": "error", "error": {"type": UNAUTHORIZED.type, "message": TOLD}}),
        *((path, {"message": TOLD}) for path in ("/v1/embed", "/v2/embed", "/v2/rerank")),
        *(
            (path, {"error": {"message": TOLD, "type": UNAUTHORIZED.type, "param": None}})
            for path in ("/v1/embeddings", "/v1/rerank", "/nowhere", "")
        ),
    ],
)
def test_rejections_have_the_shape_of_their_api(path: str, body: dict[str, object]) -> None:
    told = json.loads(error_body(UNAUTHORIZED, path))
    told.get("error", {}).pop("code", None)
    assert told == body
