"""How many open files a server needs."""

import resource

import pytest

from headrace.errors import ConfigError
from headrace.system.file_limit import files_besides, raise_file_limit


def test_the_limit_is_raised_to_what_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    raised = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    assert raise_file_limit(6) == 4096
    assert raised == [(4096, 4096)]


def test_too_low_a_limit_is_refused_with_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(ConfigError, match=r"64 files open \(ulimit -n\).* needs 88, and one more"):
        raise_file_limit(6)
    assert files_besides(6) == 72
