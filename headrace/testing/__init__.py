"""For tests of programs that call an LLM: scripted answers, a server, a pytest plugin.

Importing this package costs nothing: each name is imported where it is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.testing.script import (
        Delay,
        Malformed,
        MockError,
        MockReply,
        MockToolCall,
        ScriptRule,
        Words,
    )
    from headrace.testing.scripted_server import RecordedRequest, ScriptedServer

__all__ = [
    "Delay",
    "Malformed",
    "MockError",
    "MockReply",
    "MockToolCall",
    "RecordedRequest",
    "ScriptRule",
    "ScriptedServer",
    "Words",
]

SERVER = ("RecordedRequest", "ScriptedServer")


def __getattr__(name: str) -> Any:
    """Import a name from its module."""
    if name not in __all__:
        raise AttributeError(f"module 'headrace.testing' has no attribute '{name}'")
    module = "scripted_server" if name in SERVER else "script"
    return getattr(importlib.import_module(f"headrace.testing.{module}"), name)
