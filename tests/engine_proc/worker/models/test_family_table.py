"""Every family that `lower` accepts generates the text of transformers, whatever its sequences go
through; docs/models.md says so of each, and of no other."""

from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

import family_table
import pytest
from decoder_cases import DecoderCase, decoder_case
from generation import NUM_STATES, PROMPTS, Generation, HalfRightProposer
from worker_teams import Team

from headrace.engine_proc.worker.models.families.encoders import ENCODERS
from headrace.engine_proc.worker.models.families.gemma import GEMMAS
from headrace.engine_proc.worker.models.families.hybrids import HYBRIDS
from headrace.engine_proc.worker.models.families.latent import LATENT
from headrace.engine_proc.worker.models.families.mamba import MAMBAS
from headrace.engine_proc.worker.models.lowering import FAMILIES

Answers = list[list[int]]
# No class of transformers has the text alone (test_images.py), or the family at all; encoders
# generate none (test_cpu_encoder.py).
LACKED = {"qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "kimi_k2", *ENCODERS}
LACKED |= {"glm4v_text", "glm4v_moe_text"}
# Those in which something else than attention, or other keys than a layer's own, go through more.
OWN_WAYS = HYBRIDS | MAMBAS | LATENT | GEMMAS
FEW_WAYS = {"alone", "chunked", "tp 2"}


def together(generation: Generation) -> Answers:
    return generation.answers(PROMPTS)


def alone(generation: Generation) -> Answers:
    return [generation.answers([prompt])[0] for prompt in PROMPTS]


def cached(generation: Generation) -> Answers:
    """The second time, prompts are known but for their last pages."""
    first = generation.answers(PROMPTS)
    assert generation.scheduler.counts.prefix_hits == 0
    again = generation.answers(PROMPTS)
    assert generation.scheduler.counts.prefix_hits > 0
    return again if again == first else []


def preempted(generation: Generation) -> Answers:
    answers = generation.answers(PROMPTS)
    assert generation.scheduler.counts.preemptions > 0
    return answers


def with_drafts(generation: Generation) -> Answers:
    answers = generation.answers(PROMPTS)
    counts = generation.scheduler.counts
    assert 0 < counts.accepted_drafts < counts.drafts
    return answers


def after_a_death(generation: Generation) -> Answers:
    sequences = [generation.add(prompt) for prompt in PROMPTS]
    for _ in range(6):
        generation.step()
    generation.die()
    generation.run()
    return [list(sequence.generated) for sequence in sequences]


def outcomes(made: DecoderCase, wanted: Set[str]) -> Iterator[tuple[str, bool]]:
    """Yield each way that is wanted, and whether its answers are those of transformers."""
    model, expected = made.ours, made.answers
    num_states = NUM_STATES if model.spec.state_numbers else 0
    ways: dict[str, tuple[Callable[[Generation], Answers], dict[str, Any]]] = {
        "alone": (alone, {}),
        "batched": (together, {}),
        "chunked": (together, {"budget": 7}),
        "cached": (cached, {}),
        "preempted": (preempted, {"num_pages": 7}),
        "drafts": (with_drafts, {"speculation": HalfRightProposer(expected)}),
        "worker lost": (after_a_death, {}),
    }
    for way, (run, options) in ways.items():
        if way in wanted:
            yield way, run(Generation(made.make, num_states=num_states, **options)) == expected
    teams: list[Team] = []

    def make_team(**options: Any) -> Any:
        teams.append(Team(model.spec, model.weights, 2, **options))
        return teams[-1]

    try:
        yield "tp 2", together(Generation(make_team, num_states=num_states)) == expected
    finally:
        for team in teams:
            team.close()


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - LACKED))
def test_family_generates_the_text_of_transformers(family: str) -> None:
    """The table has all ways; without writing it, plain decoders go those that differ by model."""
    is_whole = family_table.WRITES or family in OWN_WAYS
    wanted = set(family_table.WAYS) if is_whole else FEW_WAYS
    found = dict(outcomes(decoder_case(family), wanted))
    if is_whole:
        family_table.record(family, family_table.CORE, found)
    assert [way for way, is_exact in found.items() if not is_exact] == []
    assert found.keys() == wanted


def test_table_has_the_families_that_are_lowered() -> None:
    rows = {name: cells for name, (where, *cells) in family_table.rows().items() if where == "core"}
    assert rows.keys() == FAMILIES.keys() - LACKED, "run `make families`"
    assert {name for name, cells in rows.items() if set(cells) != {family_table.EXACT}} == set()


def test_table_keeps_rows_of_families_not_run(tmp_path: Path) -> None:
    page, readme = tmp_path / "models.md", tmp_path / "README.md"
    readme.write_text(f"{family_table.SHORT_HEADER}\n\n")
    header = f"{family_table.HEADER}\n{family_table.RULE}"
    page.write_text(f"# Before\n\n{header}\n\nAfter.\n")
    cells = ["exact"] * len(family_table.WAYS)
    family_table.write({"b": ["core", *cells]}, page, readme)
    family_table.write(
        {"c": ["modules", *cells], "a": ["core", "differs", *cells[1:]]}, page, readme
    )
    assert page.read_text().startswith(f"# Before\n\n{header}\n| a | core | differs |")
    assert page.read_text().endswith(" |\n\nAfter.\n")
    assert list(family_table.read(page)) == ["a", "b", "c"]
    assert "| `b` | core | exact in each way |" in readme.read_text()
    assert "| `a` | core | exact: batched, " in readme.read_text()


def test_readme_has_the_table_in_short() -> None:
    for line in family_table.short(family_table.read()):
        assert family_table.WRITES or line in family_table.README.read_text(), "`make families`"
