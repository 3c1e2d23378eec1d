"""For tests of programs that call an LLM: scripted answers, a server, a pytest plugin.

Importing this package costs nothing: each name is imported where it is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.testing.recorded_request import RecordedRequest
    from headrace.testing.script import (
        Delay,
        Malformed,
        MockError,
        MockReply,
        MockToolCall,
        ScriptRule,
        Words,
    )
    from headrace.testing.scripted_server import ScriptedServer

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

# Of names that are not in `script`.
MODULES = {"RecordedRequest": "recorded_request", "ScriptedServer": "scripted_server"}


def __getattr__(name: str) -> Any:
    """Import a name from its module."""
    if name not in __all__:
        raise AttributeError(f"module 'headrace.testing' has no attribute '{name}'")
    module = importlib.import_module(f"headrace.testing.{MODULES.get(name, 'script')}")
    return getattr(module, name)
