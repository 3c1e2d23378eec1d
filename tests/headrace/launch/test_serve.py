"""The start of a server, as its log shows it."""

import logging

import pytest

from headrace.launch.serve import LOG_INTERVAL_S, LoadingProgress


def test_loading_is_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    progress = LoadingProgress(clock=lambda: now)
    with caplog.at_level(logging.INFO):
        for share in (0.0, 0.1, 0.2):
            progress.show(share)  # in no time
        now += LOG_INTERVAL_S
        progress.show(0.0)  # no weight is read yet
        progress.show(0.4)
        progress.show(0.5)
        now += LOG_INTERVAL_S
        progress.show(0.9)
        progress.clear()
    assert caplog.messages == ["loading weights: 40 %", "loading weights: 90 %"]
