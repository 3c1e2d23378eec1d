"""A profile by torch: operators, and kernels where there is a GPU."""

from pathlib import Path

from torch.profiler import profile


class TorchProfile:
    """A `profiles.Recorder`."""

    max_steps = 200  # an eager step has a thousand events or more

    def __init__(self) -> None:
        self._profile = profile()  # of all that this torch can see
        self._profile.start()

    def took(self, num_tokens: int, began_ns: int, ended_ns: int) -> None:
        """Nothing: the profiler sees what happens."""

    def write(self, path: Path) -> None:
        """Stop, and write the trace, compressed, as the path's suffix says."""
        self._profile.stop()
        self._profile.export_chrome_trace(str(path))
