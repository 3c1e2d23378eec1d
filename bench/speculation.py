"""Measure the gain of prompt lookup on a text that copies from its prompt.

Method: one stream of `/v1/completions` to a server with `--speculative ngram` and to one without,
        in turns. The prompt is a real text twice, and its beginning once more: greedily, the model
        goes on copying. After the same prompt's first words, at temperature 1, it copies nothing:
        that shows what guessing in vain costs. The first round is thrown away.
Run:    python bench/speculation.py --rounds 5
"""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack

from support import models
from support.report import Quantity, Report, parser
from support.servers import Server, StartFailed, headrace
from support.streams import complete

TEXT = slice(300, 540)  # tokens of the license, past its title
BEGINNING_TOKENS = 80
WORDS_TOKENS = 20
NEW_TOKENS = 160
FIRST_ID = 1000  # prompts begin with an id of their own, from here on
WITH, WITHOUT = "ngram", "none"
GUESSED = "headrace:spec_decode_num_draft_tokens_total"
RIGHT = "headrace:spec_decode_num_accepted_tokens_total"


def counted(server: Server) -> tuple[float, float]:
    """Return how many tokens have been guessed so far, and how many of them were right."""
    return server.metric(GUESSED) or 0.0, server.metric(RIGHT) or 0.0


def measure(
    systems: dict[str, Server],
    name: str,
    prompts: Iterator[list[int]],
    temperature: float,
    rounds: int,
) -> list[Quantity]:
    """Let both continue the same prompts, a new one in each round."""
    rate = Quantity(name, "tok/s", {system: [] for system in systems}, True)
    alike = Quantity(f"{name}, texts that are the same", "share", {WITH: []}, True)
    right = Quantity(f"{name}, guesses that are right", "share", {WITH: []}, True)
    for number, prompt in enumerate(itertools.islice(prompts, rounds + 1)):
        before = counted(systems[WITH])
        answers = {}
        for system, server in systems.items():
            (answers[system],) = complete(server.url, [prompt], NEW_TOKENS, temperature)
        guesses, hits = (b - a for a, b in zip(before, counted(systems[WITH]), strict=True))
        if number:
            for system, answer in answers.items():
                rate.samples[system].append(answer.rate)
            alike.samples[WITH].append(answers[WITH].text == answers[WITHOUT].text)
            right.samples[WITH].append(hits / guesses if guesses else 0.0)
    return [rate, alike, right]


def main() -> None:
    """Run."""
    args = parser(__doc__, rounds=5).parse_args()
    report = Report("speculation", args)
    text = models.text_tokens(TEXT.stop)[TEXT]
    kinds = {
        "copies": (text + text + text[:BEGINNING_TOKENS], 0.0),
        "copies nothing": (text[:WORDS_TOKENS], 1.0),
    }
    with ExitStack() as stack:
        try:
            speculating = stack.enter_context(headrace("--speculative", "ngram"))
        except StartFailed as error:
            report.miss(f"speculation: {error.reason}")
            return report.finish()
        systems = {WITH: speculating, WITHOUT: stack.enter_context(headrace())}
        for name, (prompt, temperature) in kinds.items():
            prompts = ([id, *prompt] for id in itertools.count(FIRST_ID))
            for quantity in measure(systems, name, prompts, temperature, args.rounds):
                report.add(quantity)
    report.finish()


if __name__ == "__main__":
    main()
