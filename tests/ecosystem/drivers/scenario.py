"""What every Python client is asked: a scenario for each capability, and how its result is judged.

A driver is a script that defines what `SCENARIOS` need and calls `main(globals())`. It runs in its
client's own environment, prints a line of JSON per capability, and imports nothing of Headrace.
"""

import gc
import json
import os
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, Literal

from pydantic import BaseModel, Field

URL, MODEL = [*sys.argv[1:3], "", ""][:2]
KEY = "none"
QUESTION = "What is the capital of France?"
# Greedy decoding writes hundreds of tokens: the other model ends the same text, or refuses it.
LONG_STORY = (
    "Write a very long story about a dragon, in 100 chapters."
    if MODEL == "demo"
    else "Count from 1 to 1000, one number per line."
)
WEATHER_QUESTION = "What is the weather in Oslo, in C? Use the tool get_weather."
PERSON_QUESTION = "Ada is 36 years old. Describe Ada."
MAX_TOKENS = 16
CALL_TOKENS = 100
STORY_TOKENS = 1500
PATIENCE_S = 60.0

DESCRIPTION = "The weather of a city, today"
PARAMETERS: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
FUNCTION: Any = {"name": "get_weather", "description": DESCRIPTION, "parameters": PARAMETERS}
TOOL: Any = {"type": "function", "function": FUNCTION}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}

Call = tuple[str, dict[str, Any]]
Driver = dict[str, Any]


class Person(BaseModel, extra="forbid"):
    """A person."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)


CALLED: list[Call] = []  # what `get_weather` was called with, the latest last


def get_weather(city: str, unit: Literal["C", "F"]) -> str:
    """Tell the weather of a city, today.

    Args:
        city: Where to look.
        unit: The unit of the temperature.
    """
    CALLED.append(("get_weather", {"city": city, "unit": unit}))
    return "7 degrees, rain"


def gauge(name: str) -> float:
    """Return a metric of the server, summed over its processes."""
    with urllib.request.urlopen(f"{URL}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"headrace:{name}{{"))


def wait_for(name: str, value: float) -> None:
    """Wait until a gauge of the server has a value; raise after `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while gauge(name) != value:
        gc.collect()  # some clients let go of a connection only when it is collected
        assert time.monotonic() < deadline, f"{name} is {gauge(name)}, not {value}"


def check_text(pieces: list[str]) -> None:
    """Check an answer; the demo model is too small for what some clients put around a question."""
    text = "".join(pieces)
    assert "Paris" in text or (text and MODEL == "demo"), pieces


def chat(driver: Driver) -> str:
    check_text([driver["chat"](QUESTION, MAX_TOKENS)])
    return ""


def stream(driver: Driver) -> str:
    pieces = list(driver["stream"](QUESTION, MAX_TOKENS))
    check_text(pieces)
    assert sum(bool(piece) for piece in pieces) > 1, pieces
    return ""


def check_call(driver: Driver, choice: str) -> None:
    """Check a call against `PARAMETERS`; a schema that a client writes itself may allow more."""
    call = driver["call"](choice)
    assert call is not None, "there is no call"
    name, arguments = call
    assert name == "get_weather", call
    assert arguments.keys() >= {"city", "unit"}, call
    assert driver.get("OPEN_SCHEMA") or len(arguments) == 2, call
    assert arguments["unit"] in ("C", "F"), call


def auto(driver: Driver) -> str:
    call = driver["call"]("auto")
    if call is None:
        return "answered"
    assert call[0] == "get_weather", call
    return "called"


def required(driver: Driver) -> str:
    check_call(driver, "required")
    return ""


def named(driver: Driver) -> str:
    check_call(driver, "named")
    return ""


def structured(driver: Driver) -> str:
    found = driver["structured"](PERSON_QUESTION, CALL_TOKENS)
    person = found if isinstance(found, BaseModel) else Person.model_validate(found)
    assert person.model_dump().keys() == {"name", "age"}, person
    return ""


def error(driver: Driver) -> str:
    """Judge how the client tells of a field that the server refuses."""
    expected = driver["ERROR"]
    try:
        driver["error"]()
    except expected as refusal:
        assert driver.get("REFUSED", "temperature") in str(refusal), refusal
        return type(refusal).__name__
    raise AssertionError(f"no {expected.__name__}")


def abort(driver: Driver) -> str:
    """Judge whether a stream that is left frees its sequence before the client ends."""
    wait_for("num_requests_running", 0)
    before = gauge("aborted_sequences_total")
    pieces: Iterator[str] = driver["stream"](LONG_STORY, STORY_TOKENS)
    next(pieces)
    assert gauge("num_requests_running") == 1, "the stream has ended already"
    pieces.close()  # type: ignore[attr-defined]
    del pieces
    wait_for("num_requests_running", 0)
    assert gauge("aborted_sequences_total") == before + 1, "the stream has ended by itself"
    return ""


Scenario = Callable[[Driver], str]
SCENARIOS: dict[str, tuple[str, Scenario]] = {
    "chat": ("chat", chat),
    "stream": ("stream", stream),
    "auto": ("call", auto),
    "required": ("call", required),
    "named": ("call", named),
    "structured": ("structured", structured),
    "error": ("error", error),
    "abort": ("stream", abort),
}


def main(driver: Driver) -> None:
    """Run the scenarios that a driver can, and print what became of each.

    `NOT_OFFERED` of a driver has the capabilities that its client lacks, with a word on why.
    """
    not_offered = driver.get("NOT_OFFERED", {})
    wanted = os.environ.get("CAPABILITY", "").split() or list(SCENARIOS)
    for capability in wanted:
        needs, scenario = SCENARIOS[capability]
        if capability in not_offered or needs not in driver:
            outcome, note = "not offered", not_offered.get(capability, "")
        else:
            try:
                outcome, note = "ok", scenario(driver)
            except Exception as problem:
                traceback.print_exc()
                outcome, note = "failed", f"{type(problem).__name__}: {problem}"
        print(json.dumps({"capability": capability, "outcome": outcome, "note": note}), flush=True)
