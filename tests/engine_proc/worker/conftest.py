"""The table of families that a run of `make families` leaves."""

import family_table


def pytest_sessionfinish() -> None:
    """Write what has been found into the page's table."""
    if family_table.WRITES and family_table.RECORD:
        family_table.write(family_table.RECORD)
