"""Which process runs which tests, and in which order."""

import functools
import re
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parents[2]
RULES = ("tests/test_layout.py", "tests/test_prose.py")  # which parse the same files
SYSTEM, MODELS = "tests/system/", "tests/engine_proc/worker/"
LONG = (SYSTEM, MODELS, "tests/adversary/")
SHARED = "server|expected"  # fixtures of tests/system/conftest.py that take long to make
DEMO = re.compile(r"\bdemo_(?:model|tokenizer)\(")
ASKING = re.compile(
    r"^(?:@pytest\.fixture.*\n(?:async )?def \w+|(?:async )?def test_\w+)\(([^)]*)\)", re.MULTILINE
)


@functools.cache
def scope_of(file: str) -> str:
    """Return a name for the files that one process runs.

    Files of tests/system that share a server belong together, and so do those that load the demo
    model in transformers. Others share tiny models of all families. Rules parse each file once.
    """
    if file in RULES:
        return RULES[0]
    text = (ROOT / file).read_text()
    if "decoder_case(" in text:
        return MODELS
    if DEMO.search(text) or (file.startswith(SYSTEM) and shares_fixtures(text)):
        return SYSTEM
    return file


def shares_fixtures(text: str) -> bool:
    """Whether the tests of a file ask for what other files ask for, too."""
    asked = re.findall(rf"\b(?:{SHARED})(?=:)", " ".join(ASKING.findall(text)))
    own = re.findall(rf"^def ({SHARED})\(", text, re.MULTILINE)
    return not set(asked) <= set(own)


class Schedule(LoadScopeScheduling):
    """Gives files to processes in the order in which they are collected."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid.split("::")[0])


def rank(item: pytest.Item) -> int:
    """Return a place for a test in an order that lets processes end together: long ones first."""
    file = item.nodeid.split("::")[0]
    if scope_of(file) in (SYSTEM, MODELS):
        return 0
    return 1 if file.startswith(LONG) else 2
