"""The sequences of a step at which workers die run alone, until the deadly one is found."""

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_rig import (
    MAX_PROMPT,
    MAX_TOKENS,
    VOCABULARY,
    Died,
    FakeWorker,
    Rig,
    generate_alone,
    make_sequence,
)

from headrace.ipc.messages import (
    request_id,
)

tokens = st.integers(0, VOCABULARY - 1)


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.lists(st.lists(tokens, min_size=1, max_size=MAX_PROMPT), min_size=1, max_size=6),
    deadly=tokens,
    page_tokens=st.integers(1, 5),
    spare_pages=st.integers(0, 12),
    max_num_seqs=st.integers(1, 6),
    depth=st.integers(1, 2),
)
def test_deadly_token_ends_only_its_sequence(
    prompts: list[list[int]],
    deadly: int,
    page_tokens: int,
    spare_pages: int,
    max_num_seqs: int,
    depth: int,
) -> None:
    num_pages = -(-(MAX_PROMPT + MAX_TOKENS) // page_tokens) + spare_pages
    rig = Rig.make(num_pages, page_tokens, 8, max_num_seqs, depth)
    rig.worker = FakeWorker(rig.pool, deadly)
    for counter, prompt in enumerate(prompts):
        rig.add(make_sequence(prompt, MAX_TOKENS, request_id(0, counter)))
    ended = set()
    for _ in range(4 * len(prompts) * (MAX_PROMPT + MAX_TOKENS)):
        if not rig.scheduler.has_work:
            break
        try:
            rig.step()
        except Died:
            convicted = rig.scheduler.lose_workers()
            rig.scheduler.recompute()
            rig.worker = FakeWorker(rig.pool, deadly)
            rig.open.clear()
            if convicted is not None:
                ended |= {s.id for s in rig.scheduler.abort(convicted.id)}
        rig.check_pages()
    assert not rig.scheduler.has_work
    for counter, prompt in enumerate(prompts):
        id, (said, _) = request_id(0, counter), generate_alone(prompt, MAX_TOKENS)
        assert (id in ended) == (deadly in prompt + said[:-1])
        assert rig.said[id] == (said[: len(rig.said[id])] if id in ended else said)


def test_suspect_that_survives_alone_rejoins_the_batch() -> None:
    rig = Rig.make(num_pages=20, page_tokens=4, budget=16, max_num_seqs=3)
    for counter in range(3):
        rig.add(make_sequence([counter + 1] * 6, 9, request_id(0, counter), stop_token_ids=[]))
    rig.step()
    rig.step()
    rig.lose()
    sizes = []
    while rig.scheduler.has_work:
        chunks = rig.scheduler.schedule()
        sizes.append(len(chunks))
        rig.scheduler.update(chunks, rig.worker.run(chunks))
    assert sizes[:4] == [1, 1, 1, 3]
