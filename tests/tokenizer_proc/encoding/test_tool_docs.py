"""What the page on tools says is so."""

import re
from pathlib import Path

from headrace.model.output_formats import (
    THOUGHT_ALIASES,
    TOOL_ALIASES,
    ThoughtFormat,
    ToolFormat,
)
from headrace.tokenizer_proc.requests.openai import decode_chat

PAGE = (Path(__file__).parents[3] / "docs" / "tools.md").read_text()


def test_the_examples_are_requests() -> None:
    offers, goes_on, custom = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (tool,) = decode_chat(offers.encode()).offered
    assert tool.function.name == "get_weather"
    assert len(decode_chat(goes_on.encode()).messages) == 3
    assert decode_chat(custom.encode()).custom_tools == ["set_month"]


def test_the_tables_have_every_name() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|([^|]*)\|", PAGE.split("## Formats")[1], re.MULTILINE))
    names = {alias: format for alias, format in [*TOOL_ALIASES.items(), *THOUGHT_ALIASES.items()]}
    assert rows.keys() == {*ToolFormat, *ThoughtFormat}
    for alias, format in names.items():
        assert f"`{alias}`" in rows[format], alias
