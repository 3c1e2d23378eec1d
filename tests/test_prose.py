"""The rules of prose that a machine can read: short sentences, and names that exist."""

import functools
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

from source_tree import ROOT, comments, python_file, text_of, tracked

MAX_WORDS = 25
MAX_MEDIAN_WORDS = 20  # of docstrings
# A paragraph ends at a blank line, a list item, an entry of `Args:` or an example.
PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. |>>> |\w+(?:, \w+)*: ))")
SOURCE = re.compile(r"(?<![\w/.*<-])((?:[\w-]+/)*[\w-]+\.(?:py|cpp|h|cuh))\b(?!\.)")
ASIDE = ("bench", "tests")
ELSEWHERE = {  # a project, the system's headers, and vLLM's and SGLang's sources
    "llama.cpp",
    "malloc.h",
    "linux/bpf_common.h",
    "linux/net_tstamp.h",
    "linux/prctl.h",
    "linux/sched/types.h",
    "vllm/v1/metrics/loggers.py",
    "metrics_collector.py",
}
# A paragraph of a page ends at a blank line, a list item, a heading or a cell of a table.
PAGE_PARAGRAPH = re.compile(r"^\s*$|^(?=\s*(?:[-*] |\d+\. |#+ |\|))|(?<!\\)\|", re.MULTILINE)
NAMES = re.compile(r"`[^`]*`(?:, `[^`]*`)+")  # a list of names in code counts as one
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)\s]*\)")  # counted by its text
CODE_BLOCK = re.compile(
    r"^([ ]*)(```+)[^\n]*\n.*?^\1\2[ ]*$|(?<=\n\n)(?:    [^\n]*\n|\n(?=    ))+",
    re.MULTILINE | re.DOTALL,
)
DRAWN = re.compile(r"\S {3,}\S")  # columns of a diagram or table


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a docstring without its diagrams."""
    for paragraph in PARAGRAPH.split(text):
        if not any(DRAWN.search(line) for line in paragraph.splitlines()):
            yield from re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split()))


@functools.cache
def docstring_sentences() -> list[tuple[str, str]]:
    """Return each sentence of a docstring, after its place."""
    return [
        (f"{path.relative_to(ROOT)}:{line}", sentence)
        for path in tracked("*.py")
        for line, text in python_file(path).docstrings
        for sentence in sentences(text)
    ]


def test_sentences_of_docstrings_are_short() -> None:
    long = [
        f"{place}: {len(sentence.split())} words: {sentence}"
        for place, sentence in docstring_sentences()
        if len(sentence.split()) > MAX_WORDS
    ]
    assert not long, "\n".join([f"a sentence has at most {MAX_WORDS} words", *long])


def test_median_sentence_of_docstrings_is_short() -> None:
    lengths = [len(sentence.split()) for _, sentence in docstring_sentences()]
    assert statistics.median(lengths) <= MAX_MEDIAN_WORDS


def comment_blocks(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments of a source, each with its first line. Lines below each other are one."""
    first, place, block = 0, -1, list[str]()
    for comment in comments(path):
        # One after code has a column of its own.
        column = comment.column if comment.is_alone else -comment.line
        if (comment.line, column) != (first + len(block), place):
            yield first, "\n".join(block)
            first, place, block = comment.line, column, []
        block.append(comment.text)
    yield first, "\n".join(block)


def test_sentences_of_comments_are_short() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{line}: {len(sentence.split())} words: {sentence}"
        for path in tracked("*.py", "*.cpp", "*.h", "*.cuh")
        for line, text in comment_blocks(path)
        for sentence in sentences(text)
        if len(sentence.split()) > MAX_WORDS
    ]
    assert not long, "\n".join([f"a sentence has at most {MAX_WORDS} words", *long])


def page_paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a page, each with its first line; code blocks are left out."""
    text = CODE_BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)
    start = 0
    for end in [*(match.end() for match in PAGE_PARAGRAPH.finditer(text)), len(text)]:
        body = text[start:end].lstrip(" |\n")
        line = text.count("\n", 0, end - len(body)) + 1
        yield line, LINK.sub(r"\1", NAMES.sub("``", body.rstrip(" |\n")))
        start = end


def test_sentences_of_pages_are_short() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{line}: {len(sentence.split())} words: {sentence}"
        for path in tracked("*.md")
        if path.name != "CHANGELOG.md"  # history
        for line, text in page_paragraphs(text_of(path))
        for sentence in re.split(r"(?<=[.!?])[)*_\"]*\s+", " ".join(text.split()))
        if len(sentence.split()) > MAX_WORDS
    ]
    assert not long, "\n".join([f"a sentence has at most {MAX_WORDS} words", *long])


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments and docstrings of a source, or the lines of a page, by line."""
    if path.suffix == ".md":
        yield from enumerate(text_of(path).splitlines(), 1)
        return
    if path.suffix == ".py":
        yield from python_file(path).docstrings
    yield from ((comment.line, comment.text) for comment in comments(path))


def exists(name: str, place: Path, files: dict[str, list[str]]) -> bool:
    """Whether a source exists. Without a folder, only bench and tests name files of their own.

    Args:
        files: all paths of the repository, by the name of the file.
    """
    found = files.get(name.rpartition("/")[2], [])
    if "/" not in name and place.parts[0] not in ASIDE:
        found = [file for file in found if file.split("/")[1] not in ASIDE]
    return any(file.endswith(f"/{name}") for file in found)


def test_sources_named_in_prose_exist() -> None:
    files: dict[str, list[str]] = {}
    for path in tracked():
        files.setdefault(path.name, []).append(f"/{path.relative_to(ROOT)}")
    missing = [
        f"{place}:{line}: {name}"
        for path in tracked("*.py", "*.cpp", "*.h", "*.cuh", "*.md")
        for place in [path.relative_to(ROOT)]
        if place.name != "CHANGELOG.md"  # history
        for line, text in prose(path)
        for name in SOURCE.findall(text)
        if name not in ELSEWHERE and not exists(name, place, files)
    ]
    assert not missing, "\n".join(["no file of this repository has this name", *missing])
