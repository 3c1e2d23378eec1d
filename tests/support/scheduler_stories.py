"""Requests that come, are aborted and end while a scheduler runs, and what must come of them."""

from dataclasses import dataclass

from hypothesis import strategies as st
from scheduler_rig import (
    MAX_PROMPT,
    MAX_TOKENS,
    PENALIZED,
    PLAIN,
    TEXT_PENALIZED,
    TOLD,
    VOCABULARY,
    WATCHED,
    Rig,
    generate_alone,
    make_sequence,
)

from headrace.ipc.messages import FinishReason, Sampling, request_id, request_of

LAST_EVENT = 20  # the step before which the last thing happens


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes, what it says, how it ends."""

    step: int
    prompts: list[list[int]]
    max_tokens: int
    abort_step: int | None  # the client leaves
    stop_step: int | None  # a stop string ends the first sequence
    sampling: Sampling
    priority: int
    key: int
    salt: bytes


tokens = st.integers(0, VOCABULARY - 1)
own = st.lists(tokens, min_size=1, max_size=MAX_PROMPT)
SHARED = [index % VOCABULARY for index in range(MAX_PROMPT)]
prefixed = st.integers(1, MAX_PROMPT).map(lambda length: SHARED[:length])
arrivals = st.builds(
    Arrival,
    step=st.integers(0, 12),
    prompts=st.lists(own | prefixed, min_size=1, max_size=3),
    max_tokens=st.integers(0, MAX_TOKENS),
    abort_step=st.none() | st.integers(0, LAST_EVENT),
    stop_step=st.none() | st.integers(0, LAST_EVENT),
    sampling=st.sampled_from([PLAIN, PLAIN, WATCHED, TOLD, PENALIZED, TEXT_PENALIZED]),
    priority=st.integers(-1, 1),
    key=st.integers(0, 2),
    salt=st.sampled_from([b"", b"salt"]),
)


class Story:
    """A script played on a rig, and what each sequence would have said alone."""

    def __init__(self, rig: Rig, script: list[Arrival]) -> None:
        self.rig = rig
        self.script = script
        self.expected: dict[int, tuple[list[int], FinishReason]] = {}
        self.cut_short: set[int] = set()

    def play(self, step: int) -> None:
        """Let happen what happens before this step."""
        for counter, arrival in enumerate(self.script):
            request = request_id(0, counter)
            if arrival.step == step:
                self._arrive(request, arrival)
            if arrival.abort_step == step:
                self._abort(request)
            if arrival.stop_step == step and self.rig.scheduler.end(request) is not None:
                self.cut_short.add(request)
            self.rig.check_pages()

    def _arrive(self, request: int, arrival: Arrival) -> None:
        for id, prompt in enumerate(arrival.prompts, request):
            self.expected[id] = generate_alone(prompt, arrival.max_tokens)
            options = {name: getattr(arrival, name) for name in ("priority", "key", "salt")}
            sequence = make_sequence(
                prompt, arrival.max_tokens, id, sampling=arrival.sampling, **options
            )
            self.rig.add(sequence)

    def _abort(self, request: int) -> None:
        mine = {id for id in self.expected if request_of(id) == request}
        ended = {sequence.id for sequence in self.rig.scheduler.abort(request)}
        assert ended == mine - self.rig.finished.keys() - self.cut_short
        self.cut_short |= ended

    def check(self) -> None:
        """Compare what was said with what should have been."""
        for id, (said, reason) in self.expected.items():
            if id in self.cut_short:
                assert self.rig.said[id] == said[: len(self.rig.said[id])]
            else:
                assert (self.rig.said[id], self.rig.finished[id]) == (said, reason)


def play_out(story: Story, deaths: set[int], failures: set[int], replacements: set[int]) -> None:
    """Play a story to its end, with what fails before which steps, and check it."""
    rig = story.rig
    # Each step computes a token of the most important sequence that runs, however often the others
    # are preempted. So the number of steps has an end.
    for step in range(LAST_EVENT + 1 + 48 * (MAX_PROMPT + MAX_TOKENS)):
        story.play(step)
        if step in deaths:
            rig.lose()
        if step in failures:
            rig.fail()
        if step in replacements:
            rig.replace_worker()
        if rig.scheduler.has_work:
            rig.step()
        elif step > LAST_EVENT:
            break
    assert not rig.scheduler.has_work, "it does not come to an end"
    assert rig.pool.num_free == rig.pool.num_pages
    assert rig.slots is not None and rig.slots.num_free == rig.slots.num_slots
    story.check()
