"""The examples in docstrings, run against a server."""

import doctest
from types import ModuleType
from typing import Any


def run_examples(module: ModuleType, **names: Any) -> int:
    """Run the examples that speak of one of `names`; return how many there were."""
    runner = doctest.DocTestRunner()
    ran = 0
    for test in doctest.DocTestFinder().find(module, extraglobs=names):
        source = " ".join(example.source for example in test.examples)
        if any(name in source for name in names):
            runner.run(test)
            ran += len(test.examples)
    assert not runner.summarize(verbose=False).failed
    return ran
