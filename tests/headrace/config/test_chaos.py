"""What --chaos means, and how often it strikes."""

import random
import signal

import pytest

from headrace.config.chaos import Chaos, Rule, parse_chaos
from headrace.config.config import ServerConfig
from headrace.errors import ConfigError


def test_rules_are_read() -> None:
    assert parse_chaos("kill=detokenizer:0.1/s, stop=engine:.02/s,kill=worker:0/s") == [
        Rule(signal.SIGKILL, "detokenizer", 0.1),
        Rule(signal.SIGSTOP, "engine", 0.02),
    ]
    assert parse_chaos("") == []


@pytest.mark.parametrize(
    "text", ["kill=worker", "kill=supervisor:1/s", "hurt=worker:1/s", ",", "x"]
)
def test_what_cannot_be_read_is_refused_with_what_could(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--chaos .*kill=ROLE:0.1/s"):
        ServerConfig(chaos=text)


def test_each_rule_strikes_as_often_as_it_says() -> None:
    rules = parse_chaos("kill=worker:0.5/s,stop=engine:0.1/s")
    chaos = Chaos(rules, random.Random(0))
    struck = [rule for tick in range(40_000) for rule in chaos.due(tick / 10)]
    assert struck.count(rules[0]) == pytest.approx(2000, rel=0.1)
    assert struck.count(rules[1]) == pytest.approx(400, rel=0.2)
