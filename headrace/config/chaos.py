"""Fault injection: processes end at random, so that recovery is tested before it is needed.

Pure: the supervisor sends the signals.
"""

import random
import re
import signal
from dataclasses import dataclass

from headrace.errors import ConfigError

ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
ROLES = (
    "frontend",
    "tokenizer",
    "engine",
    "worker",
    "vision",
    "detokenizer",
    "kv_store",
    "fetcher",
    "telemetry",
    "placement",
)
RULE = re.compile(rf"({'|'.join(ACTIONS)})=({'|'.join(ROLES)}):(\d+(?:\.\d+)?|\.\d+)/s")


@dataclass(frozen=True)
class Rule:
    """A signal that some process of a role is sent so often, on average."""

    signal: signal.Signals
    role: str
    per_s: float


def parse_chaos(text: str | None) -> list[Rule]:
    """Return the rules of `kill=detokenizer:0.1/s,stop=engine:0.02/s`.

    Raises:
        ConfigError: it is written otherwise.
    """
    rules = []
    for part in text.split(",") if text else []:
        match = RULE.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"--chaos {text}: {part.strip()!r} is not of the form kill=ROLE:0.1/s or "
                f"stop=ROLE:0.1/s, where ROLE is one of {', '.join(ROLES)}"
            )
        if per_s := float(match[3]):
            rules.append(Rule(ACTIONS[match[1]], match[2], per_s))
    return rules


class Chaos:
    """Rules at work: events of each come like raindrops (a Poisson process)."""

    def __init__(self, rules: list[Rule], numbers: random.Random) -> None:
        self._numbers = numbers
        self._rules = rules
        self._at: list[float] = []

    def due(self, now: float) -> list[Rule]:
        """Return whose turn has come since the last time."""
        if not self._at:
            self._at = [now + self._numbers.expovariate(rule.per_s) for rule in self._rules]
        found = []
        for place, rule in enumerate(self._rules):
            if self._at[place] <= now:
                self._at[place] = now + self._numbers.expovariate(rule.per_s)
                found.append(rule)
        return found
