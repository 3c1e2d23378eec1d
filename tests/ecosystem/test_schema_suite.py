"""The JSON-Schema-Test-Suite: what a schema allows is written, what it forbids is not.

A schema that is not supported is refused, and the refusal says why; none is taken and not followed.
"""

import functools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer

from headrace.config.model_card import find_demo_model, read_gguf
from headrace.model.grammar_compiler import GrammarCompiler
from headrace.model.tokenizer_json import read_tokenizer_json
from headrace.tokenizer_proc.grammar.grammar_checker import grammar_of
from headrace.tokenizer_proc.grammar.grammar_errors import reworded
from headrace.tokenizer_proc.requests.constraints import SOME_SPACE, of_schema

ROOT = Path(__file__).parents[2]
SUITE = ROOT / ".venv" / "schema-suite" / "tests"
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
DOCS = ROOT / "docs" / "structured_output.md"

pytestmark = pytest.mark.skipif(not SUITE.is_dir(), reason="make ecosystem")

# How many valid texts of draft 2020-12 and of draft 7 are not written, by file. What is written in
# their place is valid, too.
NARROWER = {
    "allOf.json": (2, 2, "properties come in the order of the schema"),
    "const.json": (5, 5, "a value is written in one way: as in the schema, 0 and not 0.0"),
    "enum.json": (4, 4, "the same"),
    "type.json": (1, 1, "the same: 1.0 is an integer"),
    "format.json": (10, 0, "formats are kept to, which the standard leaves open"),
    "properties.json": (1, 1, "beside patternProperties there are no names that match none"),
    "ref.json": (0, 1, "what stands beside a $ref is followed in draft 7, too"),
    "optional/float-overflow.json": (1, 1, "integers have no exponent"),
    "optional/format/date-time.json": (2, 2, "no leap seconds, which few programs read"),
    "optional/format/email.json": (4, 0, "no quoted names, no literal IPv6"),
    "optional/format/time.json": (6, 6, "no leap seconds"),
}
REFUSALS = re.compile(
    r"not supported in a schema(?: of draft 7)?: (?P<bound>\w+) (?:of|above) .*"
    r"|not supported in a schema(?: of draft 7)?: (?P<keywords>.*)"
    r"|not supported in a pattern: (?P<part>.*)"
    r"|oneOf is supported only where"
    r"|the format '(?P<format>[a-z-]+|…)' is not supported in a schema"
    r"|'.*' is not fetched"
    r"|'(?P<count>\w+)' must be a whole number, 0 or above"
    r"|'(?P<number>\w+)' has too many digits"
    r"|two of patternProperties may match one name"
    r"|a schema must be an object"
    r"|(?P<nothing>no text matches a schema that is false)"
)


class Group(NamedTuple):
    """A schema of the suite and its cases. `refusal` is empty where it is followed."""

    file: str
    schema: Any
    refusal: str
    valid: list[bool]  # each case
    written: list[bool]


@functools.cache
def groups(draft: str) -> list[Group]:
    """Return all groups of a draft, tried out."""
    folder = SUITE / draft
    return [
        tried(str(path.relative_to(folder)), draft, group)
        for path in sorted(folder.rglob("*.json"))
        for group in json.loads(path.read_text())
    ]


def tried(file: str, draft: str, group: Any) -> Group:
    """Return what comes of a schema and its cases."""
    schema = group["schema"]
    if isinstance(schema, dict):
        schema = {"$schema": DRAFTS[draft]} | schema
    valid = [case["valid"] for case in group["tests"]]
    compiler, tokenizer = of_demo_model()
    constraint = of_schema(json.dumps(schema), SOME_SPACE)
    try:
        grammar = grammar_of(constraint)
        compiler.check(grammar)
    except ValueError as error:
        return Group(file, schema, reworded(error, constraint), valid, [])
    written = []
    for case in group["tests"]:
        text = json.dumps(case["data"], ensure_ascii=False, separators=(",", ":"))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        matcher = compiler.compile(grammar)
        written.append(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())
    return Group(file, schema, "", valid, written)


@functools.cache
def of_demo_model() -> tuple[GrammarCompiler, Tokenizer]:
    model = find_demo_model()
    assert model is not None
    card = read_gguf(model)
    compiler = GrammarCompiler(card.path, card.vocab_size, card.eos_token_ids)
    return compiler, Tokenizer.from_buffer(read_tokenizer_json(Path(model)))


def disagreeing(draft: str, valid: bool) -> dict[str, int]:
    """Return by file how many cases that are `valid`, or are not, were taken for the other."""
    return Counter(
        group.file
        for group in groups(draft)
        if not group.refusal
        for of_case, written in zip(group.valid, group.written, strict=True)
        if of_case == valid != written
    )


@pytest.mark.parametrize("draft", DRAFTS)
def test_nothing_is_written_that_is_not_valid(draft: str) -> None:
    assert disagreeing(draft, valid=False) == {}


@pytest.mark.parametrize("draft", DRAFTS)
def test_what_is_valid_is_written_but_for_other_spellings(draft: str) -> None:
    column = list(DRAFTS).index(draft)
    expected = {file: known[column] for file, known in NARROWER.items() if known[column]}
    assert disagreeing(draft, valid=True) == expected


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_refusal_has_its_reason(draft: str) -> None:
    refused = [group for group in groups(draft) if group.refusal]
    assert refused
    for group in refused:
        why = REFUSALS.match(group.refusal)
        assert why is not None, group
        source = json.dumps(group.schema)
        if re.search(r'"\$ref": "https?://json-schema.org/', source):
            continue  # what is named is the metaschema's
        keywords = [
            why["format"],
            why["count"],
            why["bound"],
            why["number"],
            json.dumps(why["part"] or "")[1:-1],
            *(why["keywords"] or "").split(", "),
        ]
        assert all(keyword in source for keyword in keywords if keyword), group
        assert not (why["nothing"] and any(group.valid)), group


def test_the_documentation_has_the_figures() -> None:
    text = DOCS.read_text()
    for draft in DRAFTS:
        found = groups(draft)
        followed = [group for group in found if not group.refusal]
        num_cases = sum(len(group.valid) for group in followed)
        narrower, wider = (sum(disagreeing(draft, valid).values()) for valid in (True, False))
        cells = (
            f"`{draft}`",
            f"{len(followed)} of {len(found)}",
            f"{num_cases - narrower - wider} of {num_cases}",
            narrower,
            wider,
        )
        row = f"| {' | '.join(map(str, cells))} |"
        assert row in text, row
