"""A constraint becomes a grammar or a refusal, and none harms the process that serves."""

import dataclasses
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import psutil
import pytest
from servers import wait_until

from headrace.config.model_card import find_demo_model, read_gguf
from headrace.errors import InvalidValue, RequestError, Unsupported
from headrace.ipc.messages import Parsing
from headrace.model.output_formats import ThoughtFormat
from headrace.tokenizer_proc.grammar import grammar_checker
from headrace.tokenizer_proc.grammar.grammars import DEADLINE_S, MAX_KEPT, Grammars
from headrace.tokenizer_proc.grammar.thought_grammar import thoughts_of
from headrace.tokenizer_proc.jobs.stages import Check
from headrace.tokenizer_proc.requests.constraints import Constraint

pytestmark = pytest.mark.slow  # each test starts a process that compiles grammars

MODEL = find_demo_model()
assert MODEL is not None
CARD = read_gguf(MODEL)
THREE_DIGITS = Constraint("regex", "[0-9]{3}")
THOUGHTS = thoughts_of(Parsing(thoughts=ThoughtFormat.QWEN3), {})


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(CARD)
    yield made
    end(made)


def end(grammars: Grammars) -> None:
    process = grammars._checker.process
    if process is not None:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        assert process.wait(120) == 0, "it ends with its input"
        process.stdout.close()


def compiled(grammars: Grammars, constraint: Constraint) -> bytes:
    """Return what a constraint comes to, as soon as that is known."""
    stages = grammars.compiled("field", constraint)
    try:
        check = next(stages)
        assert isinstance(check, Check)
        wait_until(lambda: check.found is not None, "no verdict")
        stages.send([])
    except StopIteration as end:
        grammar: bytes = end.value
        return grammar
    raise AssertionError("it waits twice")


def refusal(grammars: Grammars, constraint: Constraint) -> RequestError:
    with pytest.raises(RequestError) as refused:
        compiled(grammars, constraint)
    assert refused.value.param == "field"
    return refused.value


def schema(**keywords: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(keywords))


@pytest.mark.parametrize(
    "constraint",
    [
        schema(type="object"),
        Constraint("regex", "[0-9]{3}/[a-z]+"),
        Constraint("lark", 'start: "a" | "b"'),
        Constraint("grammar", "start: NUMBER\n%import common.NUMBER"),
        Constraint("grammar", 'root ::= "a" root | "b"'),
        Constraint("regex", "[a-z]+", thoughts=THOUGHTS),
        Constraint("lark", 'start: "a" | "b"', thoughts=THOUGHTS),
    ],
)
def test_each_kind_is_compiled_and_kept(grammars: Grammars, constraint: Constraint) -> None:
    grammar = compiled(grammars, constraint)
    assert grammar
    with pytest.raises(StopIteration) as known:
        next(grammars.compiled("field", msgspec.structs.replace(constraint)))
    assert known.value.value == grammar


@pytest.mark.parametrize(
    "keywords",
    [
        {"uniqueItems": True},
        {"not": {}},
        {"contains": {}},
        {"propertyNames": {}},
        {"dependentRequired": {}},
        {"unevaluatedProperties": False},
        {"if": {}, "then": {}},
    ],
)
def test_a_keyword_that_is_not_followed_is_named(
    grammars: Grammars, keywords: dict[str, Any]
) -> None:
    error = refusal(grammars, schema(type="array", **keywords))
    assert str(error) == f"field: not supported in a schema: {', '.join(keywords)}"
    assert refusal(grammars, schema(properties={"a": keywords})).code == "invalid_value"


@pytest.mark.parametrize(
    ("constraint", "why"),
    [
        (schema(type="string", format="iban"), "the format 'iban'"),
        (schema(oneOf=[{"type": "number"}, {"type": "integer"}]), "use anyOf"),
        (schema(type="integer", minimum=5, maximum=3), "minimum, 5, is above maximum, 3"),
        (schema(**{"$ref": "http://localhost/x"}), "'http://localhost/x' is not fetched"),
        (schema(type="string", pattern="(?=a)"), "not supported in a pattern: (?="),
        (Constraint("json_schema", "nonsense"), "is not JSON: see line 1, column 1"),
        (Constraint("json_schema", "[]"), "object"),
        (Constraint("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}'), "not"),
        (
            Constraint("regex", "(a"),
            "a group is not closed; add ')', or write '\\(', at character 1",
        ),
        (Constraint("regex", "(a{1000}){1000}"), "too much work"),
        (Constraint("lark", 'start: start "a"'), "no text matches"),
        (
            Constraint("grammar", "start: undefined"),
            "no rule 'undefined'; define it, at line 1, column 8",
        ),
        (
            Constraint("grammar", "root ::= ("),
            "it is not Lark, or GBNF with '::='; mend what is there, at line 1",
        ),
        (Constraint("grammar", "root ::= " + "(" * 9000 + ")" * 9000), "nested too deeply"),
        (Constraint("lark", "start: " + "(" * 9000 + ")" * 9000), "nested too deeply"),
        (Constraint("json_schema", "[" * 100_000), "nested too deeply"),
        (Constraint("lark", 'start: start "a"', thoughts=THOUGHTS), "no text matches"),
        (Constraint("lark", "{", thoughts=THOUGHTS), "cannot be followed"),
    ],
)
def test_errors_are_short(grammars: Grammars, constraint: Constraint, why: str) -> None:
    error = refusal(grammars, constraint)
    assert isinstance(error, InvalidValue)
    assert why in str(error)
    assert len(str(error)) < 500
    assert "\n" not in str(error)


# Of llguidance, the `regex` crate, msgspec and Python: none of their words reach a client.
LIBRARY_WORDS = re.compile(
    r"parse error|llguidance|lexer|Parser|Token|\xff|xff|start: /|x-guidance|registry"
    r"|Expect(?:ed|ing)|Unimplemented|Unsatisfiable|NoExtension|recursion depth|`|\$\.|<non-verbose"
)


@pytest.mark.parametrize(
    ("constraint", "why"),
    [
        (Constraint("regex", "ab(?=c)"), "look-around are not supported; leave them out, at char"),
        (Constraint("regex", "a/["), "or write '\\[', at character 3"),
        (Constraint("regex", "[^\\s\\S]"), "no text matches it"),
        (schema(type="foo"), "there is no type 'foo'"),
        (schema(properties={"a": {"$ref": "#/$defs/B"}}), "nothing at the $ref '#/$defs/B'"),
        (schema(type="string", minLength="5"), "'minLength' must be a whole number"),
        (schema(type="string", pattern="a("), "at character 2 of 'a('"),
        (schema(type="string", pattern="^a$b"), "anchors, boundaries and look-around"),
        (schema(const=1, type="string"), "no text matches it"),
        (Constraint("grammar", 'start: "a\n'), "at line 1, column 10"),
        (Constraint("grammar", "start: <tool>"), "no special token '<tool>'"),
        (Constraint("grammar", "start: <[999999]>"), "only the client's own rules"),
        (Constraint("grammar", 'start: "a" b\nb: /[/'), "'[', at line 2, column 4"),
        (
            Constraint("structural_tag", '{"format": 5}'),
            "format: must be an object, not an integer",
        ),
        (
            Constraint("structural_tag", '{"format": {"type": "regex", "pattern": "("}}'),
            "a group is not closed",
        ),
        (
            Constraint(
                "structural_tag",
                '{"format": {"type": "json_schema", "json_schema": {"type": "x"}}}',
            ),
            "there is no type 'x'",
        ),
    ],
)
def test_no_words_of_a_library_reach_a_client(
    grammars: Grammars, constraint: Constraint, why: str
) -> None:
    error = refusal(grammars, constraint)
    assert why in str(error)
    assert not LIBRARY_WORDS.search(str(error)), error


def test_what_a_library_says_goes_to_the_log(
    grammars: Grammars, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        refusal(grammars, Constraint("regex", "only(once"))
    assert "unclosed group" in caplog.text


# Whether a text can match all of these patterns takes minutes to find out.
HOSTILE = schema(
    allOf=[
        {"type": "string", "pattern": f"(a|b|c)*{'abc'[i % 3]}(a|b|c){{{i + 3}}}"}
        for i in range(30)
    ]
)


def test_slow_grammar_is_ended_by_the_kernel_others_are_served() -> None:
    grammars = Grammars(CARD)
    error = refusal(grammars, HOSTILE)
    assert str(error) == "field: takes more than 1 s of CPU time to compile"
    assert grammars._checker.process is None
    assert refusal(grammars, HOSTILE).args == error.args, "that is known now"
    assert grammars._checker.process is None
    assert compiled(grammars, Constraint("regex", "a"))
    end(grammars)


def test_hung_checker_is_ended_and_the_grammar_not_blamed() -> None:
    grammars = Grammars(CARD)
    first = Constraint("regex", "a")
    compiled(grammars, Constraint("regex", "b"))
    assert grammars._checker.process is not None
    grammars._checker.process.send_signal(signal.SIGSTOP)
    grammars._checker.deadline_s = 0.1
    assert str(refusal(grammars, first)) == "field: could not be compiled; try again"
    grammars._checker.deadline_s = DEADLINE_S
    assert compiled(grammars, first)
    end(grammars)


def test_grammar_is_not_blamed_for_a_failed_process_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fresh = Grammars(CARD)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/there/is/nothing")
        assert str(refusal(fresh, THREE_DIGITS)) == "field: could not be compiled; try again"
    assert compiled(fresh, THREE_DIGITS)
    end(fresh)


def test_a_checker_that_dies_is_replaced(grammars: Grammars) -> None:
    compiled(grammars, Constraint("regex", "first"))
    process = grammars._checker.process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    assert "memory" in str(refusal(grammars, Constraint("regex", "second")))
    assert compiled(grammars, Constraint("regex", "third"))


def test_memory_is_bounded(grammars: Grammars) -> None:
    compiled(grammars, Constraint("regex", "a"))
    assert grammars._checker.process is not None
    process = psutil.Process(grammars._checker.process.pid)
    limit, _ = process.rlimit(psutil.RLIMIT_AS)
    assert 0 < limit < process.memory_info().vms + 2 * grammar_checker.MEMORY_BYTES
    assert process.cmdline()[0] == f"headrace: grammars of {os.getpid()}"


def test_what_is_kept_is_bounded() -> None:
    grammars = Grammars(CARD)
    grammars._thread = threading.current_thread()  # nothing is checked
    for number in range(MAX_KEPT + 10):
        next(grammars.compiled("field", Constraint("regex", str(number))))
    assert len(grammars._kept) == MAX_KEPT
    assert grammars._wanted.qsize() == MAX_KEPT + 10


@pytest.mark.parametrize(
    ("grammars", "why"),
    [
        (Grammars(CARD, follows=False), "--engine mock follows no grammar"),
        (Grammars(dataclasses.replace(CARD, eos_token_ids=[])), "no token that ends a text"),
        (
            Grammars(dataclasses.replace(CARD, vocab_size=1)),
            "allows no grammar: EOS [2] is none of",
        ),
    ],
)
def test_a_server_that_follows_no_grammar_says_why(grammars: Grammars, why: str) -> None:
    error = refusal(grammars, Constraint("regex", "a"))
    assert isinstance(error, Unsupported)
    assert why in str(error)
    end(grammars)
