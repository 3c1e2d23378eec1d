"""What a parser makes of a text that comes in parts, and a fuzz target of all parsers."""

import itertools
from collections.abc import Sequence

from model_outputs import EXAMPLES, FORMATS

from headrace.detokenizer_proc.parser_selection import parser_of
from headrace.detokenizer_proc.parsers.pieces import (
    Arguments,
    Content,
    Gathered,
    Piece,
    ToolCallStart,
    gathered,
)
from headrace.ipc.messages import Parsing

NUM_CUTS, CUT_BYTES = 3, 2
HEAD_BYTES = 1 + NUM_CUTS * CUT_BYTES  # of a target's input: a format and places, then the text


def pieces_of(parsing: Parsing, *parts: str) -> list[Piece]:
    """Return what is final after each part, and at the end. Calls are named id0, id1 and so on."""
    numbers = itertools.count()
    parser = parser_of(parsing, lambda: f"id{next(numbers)}")
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return pieces + parser.flush()


def read(parsing: Parsing, *parts: str) -> Gathered:
    """Return the whole of a text that comes in parts."""
    return gathered(pieces_of(parsing, *parts))


def cut(text: str, places: Sequence[int]) -> list[str]:
    """Return a text in parts."""
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


def check_pieces(pieces: Sequence[Piece]) -> None:
    """No piece is empty; calls begin in order, and their arguments follow them."""
    assert all(not isinstance(p, Content | Arguments) or p.text for p in pieces)
    begun = [piece.index for piece in pieces if isinstance(piece, ToolCallStart)]
    assert begun == list(range(len(begun)))
    indices = [p.index for p in pieces if isinstance(p, ToolCallStart | Arguments)]
    assert indices == sorted(indices)


def run_parsers(data: bytes) -> None:
    """Read a text in one, cut, and letter by letter: it says the same."""
    head, text = (
        data[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0"),
        data[HEAD_BYTES:].decode(errors="replace"),
    )
    parsing = FORMATS[head[0] % len(FORMATS)]
    places = [
        int.from_bytes(head[at : at + CUT_BYTES], "little")
        for at in range(1, HEAD_BYTES, CUT_BYTES)
    ]
    pieces = pieces_of(parsing, text)
    check_pieces(pieces)
    assert read(parsing, *cut(text, places)) == gathered(pieces)
    assert read(parsing, *text) == gathered(pieces)


def parser_seeds() -> list[bytes]:
    """Return texts of every format."""
    return [
        bytes([FORMATS.index(example.parsing)]).ljust(HEAD_BYTES, b"\7") + example.text.encode()
        for example in EXAMPLES
    ]
