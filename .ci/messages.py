"""Prints docs/messages.md: every message between processes, by receiver.

Method: unions in `headrace/ipc/*messages.py` (`ToEngine`, `FromWorker`, ...) name the receivers.
    The docstring of a message names its sender (`frontend -> engine`) and its bulk frame.
Run:    make messages
"""

import re
import types
import typing
from collections.abc import Iterator

import msgspec

from headrace.ipc import fetcher_messages, messages, remote_messages, worker_messages

MODULES = (messages, worker_messages, fetcher_messages, remote_messages)
HEAD = """\
# Messages

Made by `make messages` from `headrace/ipc/*messages.py`; a test compares.

A message is a msgspec Struct, encoded by position in MessagePack. Its tag comes first, then its
fields in this order. Its frame is bulk beside the message, never copied into it. Types, units and
edge cases are in the sources. New fields are added at the end, with a default.
"""
RECEIVERS = {
    "ToTokenizer": "To a tokenizer",
    "ToEngine": "To the engine",
    "ToWorker": "To the workers",
    "FromWorker": "From a worker to the engine",
    "ToVision": "To the vision worker",
    "FromVision": "From the vision worker to the engine",
    "ToStore": "To the KV store",
    "FromStore": "From the KV store to the engine",
    "ToDetokenizer": "To a detokenizer",
    "ToFrontend": "To a frontend",
    "ToTelemetry": "To the telemetry process",
    "ToFetcher": "To the fetcher",
    "FromFetcher": "From the fetcher to a tokenizer",
    "ToGateway": "To a gateway",
    "FromGateway": "From a gateway to the seat of its engine",
    "ToStage": "To a stage on another machine",
    "FromStage": "From such a stage to the seat of its worker",
}
SENDER = re.compile(r"[:.]\s+(?:the )?(KV store|[a-z]+(?: \d| worker| or [a-z]+)?) -> ")
FRAME = re.compile(r"Frame: (.*?)\.(?:\s|$)", re.DOTALL)

Struct = type[msgspec.Struct]


def members(union: object) -> list[Struct]:
    """Return the structs of a union, or of a type that is one struct."""
    return list(typing.get_args(union)) or [typing.cast(Struct, union)]


def sender(message: Struct) -> str:
    """Return which process sends a message, as its docstring says.

    Raises:
        ValueError: the docstring has no `SENDER -> RECEIVER`.
    """
    found = SENDER.search(message.__doc__ or "")
    if found is None:
        raise ValueError(f"{message.__name__}: its docstring names no sender; write 'a -> b'")
    return found[1]


def frame(message: Struct) -> str:
    """Return what the frame beside a message holds; empty where it has none."""
    found = FRAME.search(message.__doc__ or "")
    return " ".join(found[1].split()) if found else ""


def fields(struct: Struct) -> str:
    """Return the names of the fields, in the order in which they are encoded."""
    return ", ".join(f"`{name}`" for name in struct.__struct_fields__) or "none"


def parts(struct: Struct) -> Iterator[Struct]:
    """Yield the structs that the fields of a struct hold, and theirs."""

    def structs(kind: object) -> Iterator[Struct]:
        if isinstance(kind, type) and not isinstance(kind, types.GenericAlias):
            if issubclass(kind, msgspec.Struct):
                yield kind
                yield from parts(kind)
            return
        for argument in typing.get_args(kind):
            yield from structs(argument)

    for kind in typing.get_type_hints(struct).values():
        yield from structs(kind)


def tag(struct: Struct) -> str:
    """Return the tag in code quotes; empty for a struct without one."""
    name = struct.__struct_config__.tag
    return f"`{name}`" if name else ""


def page() -> str:
    """Return the whole page."""
    lines = [HEAD]
    held: dict[Struct, None] = {}  # in the order of their first holder
    for name, title in RECEIVERS.items():
        union = next(getattr(module, name) for module in MODULES if hasattr(module, name))
        lines += [f"## {title}\n", "| tag | message | sender | fields | frame |"]
        lines += ["| --- | --- | --- | --- | --- |"]
        for message in members(union):
            row = [tag(message), f"`{message.__name__}`", sender(message), fields(message)]
            lines.append(f"| {' | '.join(row)} | {frame(message)} |")
            held |= dict.fromkeys(parts(message))
        lines.append("")
    plans = members(messages.Plan)
    lines += ["## Parts of messages\n"]
    names = ", ".join(f"`{plan.__name__}`" for plan in plans)
    lines += [f"A `plan` is one of {names}.\nThe engine hands it on unread.\n"]
    lines += ["| tag | struct | fields |", "| --- | --- | --- |"]
    for plan in plans:
        held |= dict.fromkeys([plan, *parts(plan)])
    for struct in held:
        lines.append(f"| {tag(struct)} | `{struct.__name__}` | {fields(struct)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
