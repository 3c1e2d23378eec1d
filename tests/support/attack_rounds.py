"""Rounds of an attack: seeded, and bounded by the time there is for all of them.

`ADVERSARY_S` is the budget of all of tests/adversary, in seconds; starts of servers come on top.
`ADVERSARY_SEED` is the seed; `SEED/N` runs round N alone.
"""

import itertools
import os
import random
import time
from collections.abc import Iterator

DEFAULT_S = 8
BUDGET_S = float(os.environ.get("ADVERSARY_S", DEFAULT_S))
SEED, _, ROUND = os.environ.get("ADVERSARY_SEED", "1").partition("/")


def attack_rounds(attack: str, share: float) -> Iterator[random.Random]:
    """Yield the random numbers of each round: at least one round, more until the share is spent.

    A test that fails shows what it has printed: its last line replays the round.

    Args:
        attack: its name; attacks draw independently of each other.
        share: of the budget.
    """
    end = time.monotonic() + share * BUDGET_S
    for number in [int(ROUND)] if ROUND else itertools.count():
        print(f"{attack}: replay with ADVERSARY_SEED={SEED}/{number}")
        yield random.Random(f"{SEED}/{attack}/{number}")
        if time.monotonic() > end:
            return
