"""Both ends of a link for hidden states."""

import os

from headrace.engine_proc.shm.hidden_link import HiddenLink


def both_ends(*sizes: int) -> tuple[HiddenLink, HiddenLink]:
    """Return the writer's end and the reader's of a link with these sizes."""
    fd = HiddenLink.create()
    writer, reader = HiddenLink(fd, *sizes), HiddenLink(fd, *sizes)
    os.close(fd)
    return writer, reader
