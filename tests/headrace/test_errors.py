"""Errors of others are told in a line."""

import pytest

from headrace.errors import in_a_line


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
