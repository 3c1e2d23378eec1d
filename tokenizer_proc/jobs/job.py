"""One request on its way through this process."""

import logging
import time
from typing import Any

from headrace.errors import InternalError, RequestError
from headrace.ipc.messages import HttpRequest, Times
from headrace.logs import current_request, log_failure
from headrace.tokenizer_proc.jobs.aborts import Abandoned
from headrace.tokenizer_proc.jobs.stages import Check, Ids, Outcome, Stages, Text, error_response

log = logging.getLogger(__name__)


class Dropped:
    """The outcome of a request whose client has left: nothing."""


class Job:
    """A request with `texts` to encode, or waiting, until it has an `outcome`. It fails alone."""

    def __init__(
        self, request: HttpRequest, num_bytes: int, stages: Stages, model: int = 0
    ) -> None:
        """Create the job of `stages`.

        Args:
            num_bytes: the length of the body.
            model: its place among the server's.
        """
        self.request = request
        self.model = model
        self.num_bytes = num_bytes
        self.texts: list[Text] = []
        self._check: Check[Any] | None = None
        self.outcome: Outcome | Dropped | None = None
        self._stages = stages
        self._begun = self._parsed = time.monotonic_ns()

    @property
    def times(self) -> Times:
        """When this process took the request, knew its texts and, now, their ids."""
        return Times(self._begun, self._parsed, time.monotonic_ns(), model=self.model)

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for another process."""
        check = self._check
        return self.outcome is None and check is not None and check.found is None

    def begin(self) -> None:
        """Run its first stage."""
        self.advance(None)
        self._parsed = time.monotonic_ns()

    def drop(self) -> None:
        """Leave the rest undone."""
        self._stages.close()
        self.outcome = Dropped()

    def advance(self, ids: list[Ids] | None) -> None:
        """Continue, with the ids of `texts` if the stage requested some."""
        current = current_request()
        current.id = self.request.request_id
        try:
            wanted = next(self._stages) if ids is None else self._stages.send(ids)
            self._check = wanted if isinstance(wanted, Check) else None
            self.texts = [] if isinstance(wanted, Check) else wanted
        except StopIteration as end:
            self.outcome = end.value
        except Abandoned:
            self.outcome = Dropped()
        except RequestError as error:
            self.outcome = error_response(error, self.request.path)
        except Exception as error:
            self.fail(error)
        finally:
            current.id = ""

    def fail(self, error: Exception) -> None:
        """Answer that this request has failed."""
        what = f"{self.request.method} {self.request.path} failed"
        log_failure(log, what, error, self.request.request_id)
        self.outcome = error_response(InternalError(), self.request.path)
