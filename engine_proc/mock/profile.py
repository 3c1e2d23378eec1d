"""The mock engine's timing model: step times from a profile, a small JSON file."""

import itertools
from pathlib import Path
from typing import Annotated

import msgspec

from headrace.errors import BAD_JSON, ConfigError

SHIPPED = Path(__file__).parent / "profiles"
Count = Annotated[int, msgspec.Meta(ge=0)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0)]


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step's time, in milliseconds, is the sum of

    - `step_ms` at the number of its tokens, prompts' and one per text. Points (tokens, ms) are
      joined by straight lines, which extend beyond the first and the last. A single point is a
      constant;
    - `sequence_ms` for each sequence in it;
    - `context_token_ms` for each token that these sequences have in the KV cache.
    """

    step_ms: Annotated[list[tuple[Count, Milliseconds]], msgspec.Meta(min_length=1)]
    sequence_ms: Milliseconds = 0.0
    context_token_ms: Milliseconds = 0.0
    max_num_batched_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None  # the flag's if absent
    description: str = ""

    def __post_init__(self) -> None:
        tokens = [point[0] for point in self.step_ms]
        if any(a >= b for a, b in itertools.pairwise(tokens)):
            raise ValueError(f"the points of step_ms must go up in tokens, not {tokens}")

    def seconds(self, num_tokens: int, num_sequences: int, num_context: int) -> float:
        """Return how long a step takes."""
        ms = self.sequence_ms * num_sequences + self.context_token_ms * num_context
        return (self._line(num_tokens) + ms) / 1e3

    def _line(self, num_tokens: int) -> float:
        points = self.step_ms
        if len(points) == 1:
            return points[0][1]
        last = len(points) - 1
        end = next((i for i in range(1, last) if num_tokens <= points[i][0]), last)
        (x0, y0), (x1, y1) = points[end - 1], points[end]
        return max(0.0, y0 + (num_tokens - x0) * (y1 - y0) / (x1 - x0))


def shipped_profiles() -> list[str]:
    """Return the names of the profiles that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def read_profile(name: str) -> Profile:
    """Read a shipped profile, by name, or any, by path.

    Raises:
        ConfigError: there is none, or it is not what it should be.
    """
    path = SHIPPED / f"{name}.json" if name in shipped_profiles() else Path(name).expanduser()
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(
            f"--mock-profile {name}: {error.strerror}; name a JSON file or one of "
            f"{', '.join(shipped_profiles())}"
        ) from None
    except BAD_JSON as error:
        raise ConfigError(f"--mock-profile {name}: {error}") from None
