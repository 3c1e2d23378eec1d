"""Which process runs which tests, and in which order."""

import functools
import re
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

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

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the test in which a process ended, if one did; others run what comes after it.

        That test fails, and does not run again: it would end the next process, or hang there.
        """
        workload = self.assigned_work.pop(node)
        left = [(unit, test) for unit in workload.values() for test in unit if not unit[test]]
        if not left:
            return None
        unit, fatal = left[0]
        unit[fatal] = True
        self.workqueue.update(
            {scope: unit for scope, unit in workload.items() if not all(unit.values())}
        )
        for other in self.nodes:
            self._reschedule(other)
        return fatal

    def _reschedule(self, node: WorkerController) -> None:
        """Give a process its next files, or word that none comes.

        A process begins a test when it knows the next one. With a file of one test it would wait
        for ever.
        """
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid.split("::")[0])


def rank(item: pytest.Item) -> int:
    """Return a place for a test in an order that lets processes end together: long ones first."""
    file = item.nodeid.split("::")[0]
    if scope_of(file) in (SYSTEM, MODELS):
        return 0
    return 1 if file.startswith(LONG) else 2
