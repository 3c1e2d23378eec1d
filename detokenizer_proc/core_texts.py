"""The texts of all sequences, by `csrc/text/detokenizer.cpp`: one call per step."""

import ctypes
import struct
import weakref
from array import array
from collections.abc import Iterator
from typing import NamedTuple

from headrace.ipc.messages import FinishReason, ResponsePlan
from headrace.model.token_table import TokenTable
from headrace.native_core import load_core

FIRST = 2
STOPPED_ROOM = 64
ROWS = 256  # of a step for which there is room from the beginning
# As `Opening` in the core.
OPENING = struct.Struct("<Q3I6B2xI")
LENGTH = struct.Struct("<I")


class FramesView(ctypes.Structure):
    """As `FramesView` in the core."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("num_bytes", ctypes.c_uint64),
        ("ids", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("num_delivered", ctypes.c_void_p),
        ("last", ctypes.c_void_p),
        ("num_entries", ctypes.c_uint64),
        ("completed", ctypes.c_void_p),
        ("num_completed", ctypes.c_uint64),
    )


class TextView(ctypes.Structure):
    """As `TextView` in the core."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("num_bytes", ctypes.c_uint64),
        ("num_tokens", ctypes.c_uint32),
        ("finished", ctypes.c_uint32),
    )


class SaidView(ctypes.Structure):
    """As `SaidView` in the core."""

    _fields_ = (
        ("ids", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("num_sequences", ctypes.c_uint64),
        ("num_tokens", ctypes.c_uint64),
    )


class CoreFrames(NamedTuple):
    """Pieces to send to a frontend: an entry per piece, and the bytes of all."""

    ids: bytes  # u64, of sequences
    lengths: bytes  # u32
    last: bytes  # u8
    num_delivered: bytes  # u32
    data: bytes
    completed: list[int]  # requests whose end is to be written


NO_FRAMES = CoreFrames(b"", b"", b"", b"", b"", [])


class CoreText(NamedTuple):
    """Text of one sequence that has not been sent yet."""

    text: str
    num_tokens: int
    finished: FinishReason


def longs(address: int | None, count: int) -> list[int]:
    """Return `count` u64 from an address."""
    return array("Q", ctypes.string_at(address or 0, 8 * count)).tolist() if count else []


class CoreTexts:
    """Texts with a table of token bytes, for `num_frontends`."""

    def __init__(self, table: TokenTable, num_frontends: int, stream_interval: int) -> None:
        self._core = load_core()
        self._core.headrace_texts_new.restype = ctypes.c_void_p
        self._core.headrace_texts_feed.restype = ctypes.c_uint32
        self._core.headrace_texts_stopped.restype = ctypes.c_uint32
        self._core.headrace_texts_count.restype = ctypes.c_uint64
        ends, end = array("I"), 0
        for token in table.token_bytes:
            end += len(token)
            ends.append(end)
        self._texts = ctypes.c_void_p(
            self._core.headrace_texts_new(
                b"".join(table.token_bytes),
                ends.tobytes(),
                bytes(id in table.special for id in range(len(ends))),
                len(ends),
                table.strips_first_space,
                num_frontends,
            )
        )
        assert self._texts
        weakref.finalize(self, self._core.headrace_texts_free, self._texts)
        self._num_frontends = num_frontends
        self._interval = stream_interval
        self._frames = FramesView()
        self._text = TextView()
        self._unknown = (ctypes.c_uint32 * ROWS)()

    def __len__(self) -> int:
        """Number of requests."""
        count: int = self._core.headrace_texts_count(self._texts)
        return count

    def open(self, id: int, plan: ResponsePlan, template: bytes) -> bool:
        """Begin a sequence, with its `event_template`; return whether it is its request's first."""
        opening = OPENING.pack(
            id,
            plan.num_sequences,
            plan.min_tokens,
            self._interval,
            plan.stream,
            plan.include_stop,
            plan.skip_special_tokens,
            plan.chat,
            plan.stream and not plan.include_usage,
            plan.num_delivered is not None,
            plan.num_delivered or 0,
        )
        data = opening + LENGTH.pack(len(template)) + template
        for stop in plan.stop:
            encoded = stop.encode()
            data += LENGTH.pack(len(encoded)) + encoded
        result: int = self._core.headrace_texts_open(self._texts, data, ctypes.c_uint64(len(data)))
        assert result, "the core reads an opening otherwise than it is written"
        return result == FIRST

    def feed(
        self, ids: bytes, counts: bytes, finished: bytes, tokens: bytes | memoryview
    ) -> list[int]:
        """Take a step's outputs; return the rows of sequences that are unknown here.

        The columns are those of a `StepOutput`; `tokens` are u32.
        """
        num_rows = len(finished)
        assert (len(ids), len(counts)) == (8 * num_rows, 4 * num_rows)
        assert 4 * sum(memoryview(counts).cast("I")) == len(tokens)
        if num_rows > len(self._unknown):
            self._unknown = (ctypes.c_uint32 * (2 * num_rows))()
        num_unknown = self._core.headrace_texts_feed(
            self._texts, ids, counts, finished, num_rows, bytes(tokens), self._unknown
        )
        return self._unknown[:num_unknown]

    def stopped(self) -> list[int]:
        """Return the sequences that the engine is to end, since the last time."""
        found: list[int] = []
        room = (ctypes.c_uint64 * STOPPED_ROOM)()
        while count := self._core.headrace_texts_stopped(self._texts, room, STOPPED_ROOM):
            found += room[:count]
        return found

    def render(self, frontend: int) -> CoreFrames:
        """Write the new output for a frontend."""
        assert 0 <= frontend < self._num_frontends
        view = self._frames
        self._core.headrace_texts_render(self._texts, frontend, ctypes.byref(view))
        count, completed = view.num_entries, longs(view.completed, view.num_completed)
        if not count:
            return NO_FRAMES._replace(completed=completed)
        return CoreFrames(
            ctypes.string_at(view.ids, 8 * count),
            ctypes.string_at(view.lengths, 4 * count),
            ctypes.string_at(view.last, count),
            ctypes.string_at(view.num_delivered, 4 * count),
            ctypes.string_at(view.data, view.num_bytes) if view.num_bytes else b"",
            completed,
        )

    def texts(self, request: int, num_sequences: int) -> Iterator[CoreText]:
        """Yield the texts of a complete request, by index."""
        for id in range(request, request + num_sequences):
            view = self._text
            self._core.headrace_texts_text(self._texts, ctypes.c_uint64(id), ctypes.byref(view))
            text = ctypes.string_at(view.data, view.num_bytes).decode() if view.num_bytes else ""
            yield CoreText(text, view.num_tokens, FinishReason(view.finished))

    def generated(self) -> tuple[bytes, bytes, bytes]:
        """Return the tokens of all sequences: ids, u64, counts, u32, and tokens, u32."""
        view = SaidView()
        self._core.headrace_texts_said(self._texts, ctypes.byref(view))
        return (
            ctypes.string_at(view.ids or 0, 8 * view.num_sequences),
            ctypes.string_at(view.counts or 0, 4 * view.num_sequences),
            ctypes.string_at(view.tokens or 0, 4 * view.num_tokens),
        )

    def close(self, request: int) -> bool:
        """Forget a request; return whether there was one."""
        num_before = len(self)
        self._core.headrace_texts_close(self._texts, ctypes.c_uint64(request))
        return len(self) < num_before
