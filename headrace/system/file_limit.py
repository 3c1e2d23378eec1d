"""The open file limit of a process: connections, links to other processes, its own files."""

import resource

from headrace.errors import ConfigError

OWN_FILES = 48  # of a process that is alone, at most
FILES_PER_PROCESS = 4  # two links to another, of two files each; for one from it OWN_FILES has room
MIN_CONNECTIONS = 16  # that a frontend takes at least


def files_besides(num_processes: int) -> int:
    """Return how many files a process may have open, of so many, that are no connections."""
    return OWN_FILES + FILES_PER_PROCESS * num_processes


def raise_file_limit(num_processes: int) -> int:
    """Allow this process, and those it starts, as many files as the system does; return how many.

    Raises:
        ConfigError: these are too few for a server of `num_processes`.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_besides(num_processes) + MIN_CONNECTIONS
    if hard < needed:
        raise ConfigError(
            f"a process may have {hard} files open (ulimit -n); a server of {num_processes} "
            f"processes needs {needed}, and one more for each connection beyond {MIN_CONNECTIONS}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
