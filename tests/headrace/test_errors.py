"""Errors of others are told in a line, and no error is as long as what a client sends."""

import pytest

from headrace.errors import MAX_END, ModelNotFound, in_a_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("it is bad"), "it is bad"),
        (ValueError("\nit is bad\n\nand more:\nhere"), "it is bad"),
        (
            ValueError("for a field:\n    it is no number\n    see there"),
            "for a field: it is no number",
        ),
        (ValueError("for a field:"), "for a field:"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_first_error_line_is_reported_with_what_follows(error: Exception, line: str) -> None:
    assert in_a_line(error) == line


def test_message_repeats_no_long_value_whole() -> None:
    message = str(ModelNotFound("x" * 10_000_000, "demo"))
    begin, end = "the model '", "' does not exist; this server has 'demo'"
    assert message == f"{begin:x<{MAX_END}} … {end:x>{MAX_END}}"
