"""Measure the time that the prefix cache saves for requests with a common prefix.

Method: 32 requests for one token share their first 1,000 tokens and end in 8 of their own. They go
        to a server with the prefix cache and to one without. They come all at once. In the second
        case one comes first, like a known system prompt, and the others after its response. Work is
        counted by the server: `headrace:computed_tokens_total`. The prefix is a new one in every
        round.
Run:    python bench/prefix_cache.py --rounds 2
"""

import itertools
import statistics
from collections.abc import Iterator
from contextlib import ExitStack

from support import models
from support.report import Quantity, Report, parser
from support.servers import Server, StartFailed, headrace
from support.streams import Stream, complete

NUM_REQUESTS = 32
SHARED_TOKENS = 1000
OWN_TOKENS = 8
FIRST_ID = 1000  # prefixes begin with an id of their own, from here on
WITH, WITHOUT = "cache on", "cache off"
WORK = "headrace:computed_tokens_total"


def conversations() -> Iterator[list[list[int]]]:
    """Yield the prompts of one round after the other."""
    shared = models.text_tokens(SHARED_TOKENS - 1)
    for id in itertools.count(FIRST_ID):
        yield [[id, *shared, *[FIRST_ID + n] * OWN_TOKENS] for n in range(NUM_REQUESTS)]


def work_of(server: Server) -> float:
    """Return the tokens the server has computed so far."""
    value = server.metric(WORK)
    assert value is not None, f"no metric {WORK}"
    return value


def measure(server: Server, prompts: list[list[int]], one_first: bool) -> tuple[float, float]:
    """Return the tokens computed, and the median milliseconds to a first token."""
    before = work_of(server)
    answers: list[Stream] = []
    for batch in (prompts[:1], prompts[1:]) if one_first else (prompts,):
        answers += complete(server.url, batch, max_tokens=1)
    waits = [1e3 * (answer.first - answer.sent) for answer in answers]
    return work_of(server) - before, statistics.median(waits)


def main() -> None:
    """Run."""
    args = parser(__doc__, rounds=2).parse_args()
    report = Report("prefix_cache", args)
    prompts = conversations()
    with ExitStack() as stack:
        try:
            off = stack.enter_context(headrace("--no-enable-prefix-caching"))
        except StartFailed as error:
            report.miss(f"the prefix cache: {error.reason}")
            return report.finish()
        systems = {WITH: stack.enter_context(headrace()), WITHOUT: off}
        for one_first in (True, False):
            order = "one first" if one_first else "all at once"
            work = Quantity(f"{order}, work", "tokens computed", {s: [] for s in systems})
            wait = Quantity(f"{order}, median time to first token", "ms", {s: [] for s in systems})
            for _ in range(args.rounds):
                for system, server in systems.items():
                    tokens, ms = measure(server, next(prompts), one_first)
                    work.samples[system].append(tokens)
                    wait.samples[system].append(ms)
            report.add(work)
            report.add(wait)
    report.finish()


if __name__ == "__main__":
    main()
