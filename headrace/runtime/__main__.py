"""`python -m headrace.runtime FD`: a process of the ring, whose note is the descriptor FD.

msgspec takes `typing_extensions` where it finds it, and Python's own `typing` does the same for it.
The package costs a process 3 MB and 29 ms of CPU time, so msgspec is imported without it.
"""

import sys

sys.modules["typing_extensions"] = None  # type: ignore[assignment]  # Python's way to say that
import msgspec  # noqa: E402, F401

del sys.modules["typing_extensions"]  # for libraries that need it

from headrace.runtime.process import main  # noqa: E402

main(int(sys.argv[1]))
