"""How many drafts a server has made, from its metrics in vLLM's names, and how they fared."""

import re
from typing import Any, NamedTuple, Self

COUNTER = re.compile(r"^vllm:spec_decode_num_(\w+?)_total(?:\{(.*)\})? (\S+)$", re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')
BY_POSITION = "accepted_tokens_per_pos"


class DraftCounts(NamedTuple):
    """Counts since a server's start, or between two times."""

    steps: float = 0  # of sequences, with drafts
    tokens: float = 0
    accepted: float = 0
    by_position: tuple[float, ...] = ()  # accepted, the first draft of a step first

    @classmethod
    def read(cls, metrics: str) -> Self:
        """Return the counts of a `/metrics` page; zeros where it has none."""
        counts: dict[str, float] = {}
        positions: dict[int, float] = {}
        for name, labels, number in COUNTER.findall(metrics):
            if name == BY_POSITION and (found := POSITION.search(labels)):
                place = int(found[1])
                positions[place] = positions.get(place, 0) + float(number)
            else:
                counts[name] = counts.get(name, 0) + float(number)
        return cls(
            counts.get("drafts", 0),
            counts.get("draft_tokens", 0),
            counts.get("accepted_tokens", 0),
            tuple(positions[place] for place in sorted(positions)),
        )

    def since(self, before: "DraftCounts") -> "DraftCounts":
        """Return what was counted since."""
        earlier = before.by_position or (0.0,) * len(self.by_position)
        by_position = tuple(a - b for a, b in zip(self.by_position, earlier, strict=True))
        tokens, accepted = self.tokens - before.tokens, self.accepted - before.accepted
        return DraftCounts(self.steps - before.steps, tokens, accepted, by_position)

    def as_result(self) -> dict[str, Any]:
        """Return the figures in vLLM's names; none where nothing was drafted."""
        if not self.steps:
            return {}
        return {
            "spec_decode_acceptance_rate": 100 * self.accepted / self.tokens,
            "spec_decode_acceptance_length": 1 + self.accepted / self.steps,
            "spec_decode_num_drafts": int(self.steps),
            "spec_decode_draft_tokens": int(self.tokens),
            "spec_decode_accepted_tokens": int(self.accepted),
            "spec_decode_per_position_acceptance_rates": [
                100 * count / self.steps for count in self.by_position if count
            ],
        }
