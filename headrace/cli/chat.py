"""`headrace chat [URL | MODEL] [flags]`: a conversation in the terminal.

With a URL it talks to the server there; else it starts one, which takes the flags of `headrace
serve` and ends with it. An empty line says nothing; Ctrl-C stops an answer, Ctrl-D all.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from headrace.client.client import Client
from headrace.config.api_keys import VARIABLE
from headrace.config.flags import Parser, parse_one
from headrace.errors import HeadraceError, end_command

PROMPT = "> "
NEW = "/new"  # begins another conversation


class ChatSession:
    """The conversation so far, and its next turn."""

    def __init__(self, client: Client, system: str | None, options: dict[str, Any]) -> None:
        """`options` are fields of every request."""
        self._client = client
        self._options = options
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = [*self._opening]

    def begin(self) -> None:
        """Clear the conversation."""
        self._messages = [*self._opening]

    def say(self, text: str) -> Generator[str, None, None]:
        """Yield the response as it comes. A stopped response stays in the conversation.

        Raises:
            ApiError: the server refuses; nothing has been said then.
        """
        asked = [*self._messages, {"role": "user", "content": text}]
        answer = ""
        stream = self._client.stream_chat(asked, **self._options)
        try:
            for piece in stream:
                answer += piece
                yield piece
        finally:
            stream.close()
            if answer:
                self._messages = [*asked, {"role": "assistant", "content": answer}]


def converse(
    conversation: ChatSession, lines: Iterable[str], write: Callable[[str], object]
) -> None:
    """Answer each line of input."""
    for line in lines:
        if line.strip() == NEW:
            conversation.begin()
        elif line.strip():
            write_response(conversation, line, write)


def write_response(conversation: ChatSession, text: str, write: Callable[[str], object]) -> None:
    """Write one answer, or what went wrong with it."""
    pieces = conversation.say(text)
    try:
        for piece in pieces:
            write(piece)
    except KeyboardInterrupt:
        pieces.close()
        write(" …")
    except HeadraceError as error:
        write(f"error: {error}")
    write("\n")


def typed() -> Iterator[str]:
    """Yield what a person types, until Ctrl-D."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # with it, lines can be edited and come again
    while True:
        try:
            yield input(PROMPT if sys.stdin.isatty() else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            print()


def parser() -> Parser:
    """Return the parser of the flags that do not concern a server."""
    made = Parser(
        prog="headrace chat",
        usage="%(prog)s [URL | MODEL] [flags]",
        description="Talk to a model: at a URL, or on a server of its own, which takes the flags "
        f"of `headrace serve`. {NEW} begins another conversation.",
        allow_abbrev=False,
    )
    made.add_argument("--system", metavar="TEXT", help="the system message")
    made.add_argument("--temperature", type=float, metavar="X", help="0 is greedy")
    made.add_argument("--max-tokens", type=int, metavar="N", help="tokens of an answer, at most")
    return made


def connect(argv: list[str]) -> Client:
    """Return a client of the server that the rest of the command line names or describes.

    Raises:
        HeadraceError: there is none, and none can be started.
    """
    key = os.environ.get(VARIABLE)
    if argv and argv[0].startswith(("http://", "https://")):
        fields = parse_one(argv[1:])
        keys = fields.pop("api_key", (key,))
        if fields:
            raise HeadraceError(
                f"{', '.join(fields)}: flags need a MODEL; a running server takes none"
            )
        return Client(argv[0].removesuffix("/").removesuffix("/v1"), keys[0])
    fields = parse_one(argv)
    print("starting a server …", file=sys.stderr)
    return Client.launch(fields.pop("model", None), **fields)


def main(argv: list[str]) -> None:
    """Converse until the input ends."""
    try:
        arguments, rest = parser().parse_known_args(argv)
        names = ("temperature", "max_tokens")
        options = {n: v for n in names if (v := getattr(arguments, n)) is not None}
        with connect(rest) as client:
            conversation = ChatSession(client, arguments.system, options)
            converse(conversation, typed(), lambda text: print(text, end="", flush=True))
    except HeadraceError as error:
        end_command("headrace chat", error)
