"""The examples in `/openapi.json`. System tests send them (`described.answer_examples`)."""

import pytest

from headrace.routes import KV_WARM, ROUTES, Lane, Need
from headrace.tokenizer_proc.openapi.route_bodies import BODIES, EXAMPLES

CASES = [(path, title) for path, examples in EXAMPLES.items() for title in examples]


def test_each_route_with_a_body_has_examples() -> None:
    posted = (route for route in ROUTES if route.lane is Lane.TOKENIZER)
    # Without adapters, a server refuses those about them, and without a key what it guards.
    paths = {route.path for route in posted if route.need is not Need.ADAPTERS}
    assert EXAMPLES.keys() == paths - {KV_WARM}


@pytest.mark.parametrize(("path", "title"), CASES)
def test_example_has_fields_of_its_route(path: str, title: str) -> None:
    example, kind = EXAMPLES[path][title], BODIES[path].request
    assert kind is not None
    assert example.keys() <= set(kind.__struct_fields__)
