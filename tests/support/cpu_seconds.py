"""CPU seconds of tests, those of processes included that they start and wait for.

Run: PYTHONPATH=tests/support .venv/bin/pytest -n 0 -p cpu_seconds tests/engine_proc/worker/cuda

What is imported counts for the file, and for the test, that comes to it first. A server that ends
by SIGKILL takes the seconds of its processes with it. A machine that others use counts more.
"""

import os
from collections import Counter
from collections.abc import Generator

import pytest

MOST_LINES = 40
LEAST_S = 0.1

by_file, by_test = Counter[str](), Counter[str]()
last_s = 0.0


def take() -> float:
    """Return the CPU seconds since the last call."""
    global last_s
    before, last_s = last_s, sum(os.times()[:4])
    return last_s - before


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    take()
    report = yield
    by_file[collector.nodeid.split("::")[0]] += take()
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    spent = take()
    by_file[item.nodeid.split("::")[0]] += spent
    by_test[item.nodeid] += spent
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section(f"{by_file.total():.1f} CPU seconds")
    for counts in (by_file, by_test):
        for name, spent in counts.most_common(MOST_LINES):
            if spent >= LEAST_S:
                terminalreporter.line(f"{spent:7.2f} {name}")
