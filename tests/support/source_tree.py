"""The files of the repository, and what rules ask of them. Each file is read and parsed once."""

import ast
import functools
import io
import subprocess
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LITERALS = ast.Tuple | ast.List | ast.Set


class Comment(NamedTuple):
    """A comment without its mark. One after code is not alone in its line."""

    line: int
    column: int
    text: str
    is_alone: bool


@dataclass
class PythonFile:
    """The parts of a Python file that there are rules about."""

    imports: set[str] = field(default_factory=set)  # dotted names, however they are written
    functions: list[tuple[str, int]] = field(default_factory=list)  # with their numbers of lines
    classes: list[str] = field(default_factory=list)  # of the module itself
    docstrings: list[tuple[int, str]] = field(default_factory=list)  # by first line; fields' too
    unpacked_literals: list[int] = field(default_factory=list)  # the lines of `*(a, b)` in place


@functools.cache
def tracked(*patterns: str) -> list[Path]:
    """Return the files of the repository that match a pattern, links aside."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run([*command, *patterns], capture_output=True, text=True, check=True)
    paths = [ROOT / line for line in listed.stdout.splitlines()]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


@functools.cache
def text_of(path: Path) -> str:
    """Return the text of a file."""
    return path.read_text()


@functools.cache
def python_file(path: Path) -> PythonFile:
    """Return what rules ask of a Python file."""
    module = ast.parse(text_of(path))
    found = PythonFile(
        classes=[node.name for node in module.body if isinstance(node, ast.ClassDef)]
    )
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom):
            found.imports |= {node.module or "", *(f"{node.module}.{a.name}" for a in node.names)}
        elif isinstance(node, ast.Import):
            found.imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.functions.append((node.name, (node.end_lineno or 0) - node.lineno + 1))
        elif isinstance(node, ast.Starred) and isinstance(node.value, LITERALS):
            found.unpacked_literals.append(node.lineno)
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found.docstrings.append((value.lineno, value.value))
    return found


@functools.cache
def comments(path: Path) -> list[Comment]:
    """Return the comments of a source in Python, C++ or CUDA."""
    return [*(python_comments if path.suffix == ".py" else c_comments)(text_of(path))]


def python_comments(text: str) -> Iterator[Comment]:
    """Yield the comments of Python code."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            yield Comment(line, column, token.string[1:], not token.line[:column].strip())


def c_comments(text: str) -> Iterator[Comment]:
    """Yield the comments of C++ code, each of one line."""
    for line, whole in enumerate(text.splitlines(), 1):
        code, mark, comment = whole.partition("//")
        if mark and not code.endswith(":"):  # of a URL in a string
            yield Comment(line, len(code), comment, not code.strip())
