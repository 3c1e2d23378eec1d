"""One line per event, process name first."""

import logging
import sys


def setup(process: str, level: str) -> None:
    """Log to standard error as `time process level event`."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"%(asctime)s {process} %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
