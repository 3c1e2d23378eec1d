"""A process that tries grammars out, so that none can harm the one that serves requests.

A grammar's compilation is bounded: in CPU time, at which the kernel ends this process, and memory.
The parent sees it end, and starts another for the next grammar. It reads `Constraint`s
from standard input and writes `Verdict`s to standard output; the first message is a `Task`.
"""

import contextlib
import os
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import setproctitle

from headrace.runtime.process import die_with_parent
from headrace.tokenizer_proc.grammar.exact_schemas import exact_source
from headrace.tokenizer_proc.grammar.grammar_errors import for_the_log, reworded
from headrace.tokenizer_proc.grammar.structural_grammar import tag_grammar
from headrace.tokenizer_proc.grammar.thought_grammar import after_thoughts, or_calls
from headrace.tokenizer_proc.jobs.child_pipe import read, write
from headrace.tokenizer_proc.requests.constraints import Constraint

if TYPE_CHECKING:
    from headrace.model.grammar_compiler import GrammarCompiler

CPU_S = 1.0  # of a grammar; the largest that people write take 0.1 s
MEMORY_BYTES = 1 << 30  # beyond what is needed to begin


class Task(msgspec.Struct, frozen=True, array_like=True):
    """The tokenizer that grammars are for."""

    model_path: str
    vocab_size: int
    eos_token_ids: list[int]
    title: str  # of the process


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """The result for a grammar: the form for the engine, or the error."""

    grammar: bytes = b""
    error: str = ""
    is_supported: bool = True  # no grammar is, for tokenizers that llguidance does not know
    may_change: bool = False  # the grammar is not to blame
    detail: str = ""  # what a library says of it, for the log


def main() -> None:
    """Answer until standard input ends."""
    die_with_parent(os.getppid(), signal.SIGKILL)  # a hung process does not see its input end
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    task = read(source, Task)
    if task is None:
        return
    setproctitle.setproctitle(task.title)
    from headrace.model.grammar_compiler import GrammarCompiler

    compiler, reason = None, ""
    try:
        compiler = GrammarCompiler(task.model_path, task.vocab_size, task.eos_token_ids)
    except ValueError as error:
        reason = str(error)
    limit_memory()
    while (constraint := read(source, Constraint)) is not None:
        if compiler is None:
            write(sink, Verdict(error=reason, is_supported=False))
            continue
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        try:
            verdict = Verdict(checked(compiler, constraint).encode())
        except (ValueError, RecursionError) as error:
            verdict = Verdict(error=reworded(error, constraint), detail=for_the_log(error))
        signal.setitimer(signal.ITIMER_PROF, 0)
        write(sink, verdict)


def checked(compiler: "GrammarCompiler", constraint: Constraint) -> str:
    """Return the grammar that a constraint comes to, thoughts before it included.

    Raises:
        ValueError, RecursionError: the grammar is wrong, or takes too much.
    """
    grammar, is_lark = grammar_of(constraint), constraint.kind in ("lark", "grammar")
    compiler.check(grammar)  # alone, since trying ends within the thoughts
    if constraint.opening:
        grammar, is_lark = after_thoughts(constraint.opening, grammar, is_lark, "opened"), False
    if constraint.calls:
        calls = first_sound(compiler, constraint.calls)
        grammar, is_lark = or_calls(calls, grammar, is_lark), False
        compiler.check(grammar)
    if constraint.thoughts:
        grammar = after_thoughts(constraint.thoughts, grammar, is_lark)
        compiler.check(grammar)
    return grammar


def first_sound(compiler: "GrammarCompiler", grammars: tuple[str, ...]) -> str:
    """Return the first grammar that compiles, from the strictest to the loosest."""
    for grammar in grammars[:-1]:
        with contextlib.suppress(ValueError):
            compiler.check(grammar)
            return grammar
    compiler.check(grammars[-1])
    return grammars[-1]


def limit_memory() -> None:
    """Have the kernel refuse this process much more memory than it has now."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = num_pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def grammar_of(constraint: Constraint) -> str:
    """Return a constraint in llguidance's form.

    Raises:
        ValueError: it is not JSON, or not GBNF. The rest is found when it is compiled.
    """
    from llguidance import LLMatcher, grammar_from

    match constraint.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(
                exact_source(constraint.source, constraint.closed),
                overrides={
                    "whitespace_flexible": bool(constraint.space),
                    "whitespace_pattern": constraint.space or None,
                    "lenient": False,
                    "coerce_one_of": False,
                },
            )
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.source)
        case "lark":
            return LLMatcher.grammar_from_lark(constraint.source)
        case "structural_tag":
            return tag_grammar(constraint.source, constraint.special_tokens)
        case "grammar":
            return grammar_from("grammar", constraint.source)


if __name__ == "__main__":
    main()
