"""The link of a tokenizer or detokenizer to an engine on another machine.

It spares messages the way through the process in the engine's seat. That has the session, and
publishes it on the board. A link opens once its gateway answers that it has this session. Messages
name their session, and both ends drop those of another one. A link that breaks may have lost
messages, so its session ends.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.board.board import Slot
from headrace.board.fields import EngineField
from headrace.config.process_configs import RemoteEngine
from headrace.errors import ConfigError
from headrace.ipc.curve_key import read_key
from headrace.ipc.curve_links import CurveLink
from headrace.ipc.messages import GenerateRequest
from headrace.ipc.remote_messages import Member
from headrace.ipc.sockets import STEP_HIGH_WATER, Frame
from headrace.runtime.placed_address import engine_address

NO_DETOKENIZER = -1


class SessionLink:
    """A link that lasts as long as the session on the board.

    Args:
        slot: the engine's seat.
        detokenizer: whose steps come by this link, if any do.
    """

    def __init__(
        self,
        run_dir: str,
        remote: RemoteEngine,
        slot: Slot,
        detokenizer: int = NO_DETOKENIZER,
    ) -> None:
        self._run_dir = run_dir
        self._remote = remote
        self._slot = slot
        self._detokenizer = detokenizer
        self._link: CurveLink | None = None
        self._has_asked = False  # whether its gateway has the session,
        self._is_open = False  # and it has
        self._encoder = msgspec.msgpack.Encoder()
        self._head = b""
        self.session = 0

    @property
    def polled(self) -> list[tuple[Any, int]]:
        """What tells that there is something to do here."""
        return [] if self._link is None else self._link.polled

    def follow(self) -> bool:
        """Keep to the session on the board; return whether messages can go by this link."""
        session = self._slot[EngineField.SESSION]
        if session != self.session:
            self._begin(session)
        if self._link is None:
            return False
        num_lost = self._link.lost_connections()
        if num_lost and self._has_asked:
            self.give_up()
        elif self._link.is_connected and not self._has_asked:
            self._has_asked = self._link.send([self._head])
        elif self._has_asked and not self._is_open:
            self._open(self._link.receive())
        return self._is_open

    def _open(self, answer: list[Frame] | None) -> None:
        """Open the link if its gateway has the session; one of another engine has not."""
        self._is_open = answer == [self._head]
        if not (answer is None or self._is_open):
            self.close()

    def send(self, requests: Sequence[tuple[GenerateRequest, Frame]]) -> bool:
        """Send requests as one message; return False, with nothing sent, where that cannot be."""
        if not self.follow():
            return False
        assert self._link is not None
        frames: list[Frame] = [self._head]
        for request, prompt in requests:
            frames += [self._encoder.encode(request), prompt]
        return self._link.send(frames)

    def receive(self) -> list[Frame] | None:
        """Return the next message of the engine, or None."""
        return self._link.receive() if self._link is not None and self._is_open else None

    def give_up(self) -> None:
        """Have the session end."""
        self._slot[EngineField.LOST_SESSION] = self.session
        self.close()

    def close(self) -> None:
        """Drop the connection with what waits; there is another one in the next session."""
        if self._link is not None:
            self._link.close()
        self._link, self._has_asked, self._is_open = None, False, False

    def _begin(self, session: int) -> None:
        """Connect for a session; 0 is none. What cannot be reached has its seat's link alone."""
        self.close()
        self.session = session
        if not session:
            return
        where = engine_address(self._run_dir, self._slot.seat.index, self._remote)
        if where is None:
            return
        self._head = self._encoder.encode(Member(session, self._detokenizer))
        try:
            key = read_key(self._remote.key_file)
            self._link = CurveLink(where, key, keeps_alive=True, high_water=STEP_HIGH_WATER)
        except (ConfigError, ValueError):
            return
