"""The rules of prose that a machine can read: short sentences, and names that exist."""

import ast
import re
import statistics
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
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


def tracked(*patterns: str) -> list[Path]:
    """Return the files of the repository that match a pattern, links aside."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run([*command, *patterns], capture_output=True, text=True, check=True)
    paths = [ROOT / line for line in listed.stdout.splitlines()]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield all docstrings of a file, those of fields included, each with its first line."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.value


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a docstring without its diagrams."""
    for paragraph in PARAGRAPH.split(text):
        if not any(DRAWN.search(line) for line in paragraph.splitlines()):
            yield from re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split()))


def test_sentences_of_docstrings_are_short() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{line}: {len(sentence.split())} words: {sentence}"
        for path in tracked("*.py")
        for line, text in docstrings(path)
        for sentence in sentences(text)
        if len(sentence.split()) > MAX_WORDS
    ]
    assert not long, "\n".join([f"a sentence has at most {MAX_WORDS} words", *long])


def test_median_sentence_of_docstrings_is_short() -> None:
    lengths = [
        len(sentence.split())
        for path in tracked("*.py")
        for _, text in docstrings(path)
        for sentence in sentences(text)
    ]
    assert statistics.median(lengths) <= MAX_MEDIAN_WORDS


def comment_blocks(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments of a source, each with its first line. Lines below each other are one."""
    first, place, block = 0, -1, list[str]()
    for number, column, text in comment_lines(path):
        if (number, column) != (first + len(block), place):
            yield first, "\n".join(block)
            first, place, block = number, column, []
        block.append(text)
    yield first, "\n".join(block)


def comment_lines(path: Path) -> Iterator[tuple[int, int, str]]:
    """Yield line, column and text of each comment. One after code has a column of its own."""
    if path.suffix == ".py":
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type == tokenize.COMMENT:
                    number, column = token.start
                    is_alone = not token.line[:column].strip()
                    yield number, column if is_alone else -number, token.string[1:]
        return
    for number, line in enumerate(path.read_text().splitlines(), 1):
        code, mark, text = line.partition("//")
        if mark and not code.endswith(":"):  # of a URL in a string
            yield number, -number if code.strip() else len(code), text


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
        for line, text in page_paragraphs(path.read_text())
        for sentence in re.split(r"(?<=[.!?])[)*_\"]*\s+", " ".join(text.split()))
        if len(sentence.split()) > MAX_WORDS
    ]
    assert not long, "\n".join([f"a sentence has at most {MAX_WORDS} words", *long])


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments and docstrings of a source, or the lines of a page."""
    if path.suffix == ".py":
        yield from docstrings(path)
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type == tokenize.COMMENT:
                    yield token.start[0], token.string
        return
    for number, line in enumerate(path.read_text().splitlines(), 1):
        yield number, line if path.suffix == ".md" else line.partition("//")[2]


def exists(name: str, place: Path, files: list[str]) -> bool:
    """Whether a source exists. Without a folder, only bench and tests name files of their own."""
    if "/" not in name and place.parts[0] not in ASIDE:
        files = [file for file in files if file.split("/")[1] not in ASIDE]
    return any(file.endswith(f"/{name}") for file in files)


def test_sources_named_in_prose_exist() -> None:
    files = [f"/{path.relative_to(ROOT)}" for path in tracked()]
    missing = [
        f"{place}:{line}: {name}"
        for path in tracked("*.py", "*.cpp", "*.h", "*.cuh", "*.md")
        for place in [path.relative_to(ROOT)]
        if place.name != "CHANGELOG.md"  # history
        for line, text in comments(path)
        for name in SOURCE.findall(text)
        if name not in ELSEWHERE and not exists(name, place, files)
    ]
    assert not missing, "\n".join(["no file of this repository has this name", *missing])
