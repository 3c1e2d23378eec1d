"""`/mock`, and the handlers of generation that answer as the script has it.

A scripted request goes the way of any other: it is validated, rendered and planned. Then its
sequences carry the tokens of the scripted text to the mock engine.
"""

import threading
from array import array
from collections.abc import Mapping
from functools import partial
from itertools import takewhile
from typing import Any

import msgspec

from headrace import routes
from headrace.errors import BAD_JSON, InvalidBody, RequestError
from headrace.ipc.messages import (
    FaultKind,
    GenerateRequest,
    HttpRequest,
    Plan,
    ResponseFault,
    ResponsePlan,
    ScriptedTokens,
)
from headrace.testing.script import (
    Delay,
    Malformed,
    MockError,
    MockReply,
    MockToolCall,
    Script,
    ScriptState,
    Undelayed,
    Words,
)
from headrace.tokenizer_proc.jobs.stages import (
    Body,
    Check,
    Encoding,
    Handler,
    Ids,
    ImmediateResponse,
    Outcome,
    Sequences,
    Stages,
    Text,
    error_response,
    json_response,
)
from headrace.tokenizer_proc.scripts.response_text import error_of, response_text, words_of
from headrace.tokenizer_proc.scripts.script_store import ScriptStore

GENERATION = {routes.CHAT, routes.COMPLETIONS, routes.RESPONSES, routes.MESSAGES, routes.GENERATE}
LAST = ("messages", "input", "prompt", "text")  # fields whose last entry a rule matches


class ScriptedRoutes:
    """The handlers of a server whose engine is a mock.

    Args:
        eos_token_ids: the model's; the first one ends a text.
    """

    def __init__(self, run_dir: str, eos_token_ids: list[int]) -> None:
        self._store = ScriptStore(run_dir)
        self._eos = eos_token_ids
        self._plans: msgspec.msgpack.Decoder[Plan] = msgspec.msgpack.Decoder(Plan)

    @property
    def handlers(self) -> dict[str, dict[str, Handler]]:
        """The handlers below `/mock`, by path and method."""
        return {
            routes.MOCK_SCRIPT: {routes.PUT: self._put, routes.GET: self._tell_script},
            routes.MOCK_REQUESTS: {routes.GET: self._tell_requests, routes.DELETE: self._forget},
        }

    def has_script(self) -> bool:
        """Whether a script says what is answered."""
        return self._store.has_rules

    def wrapped(self, handlers: Mapping[str, Handler]) -> dict[str, Handler]:
        """Return handlers, those that generate so that a script may say what."""
        return {
            path: partial(self._handle, handler) if path in GENERATION else handler
            for path, handler in handlers.items()
        }

    def _put(self, _http: HttpRequest, body: Body) -> ImmediateResponse:
        try:
            script = msgspec.json.decode(body, type=Script)
        except BAD_JSON as error:
            raise InvalidBody(f"the body is not a script: {error}") from None
        self._store.put(script)
        return self._tell_script(_http, body)

    def _tell_script(self, _http: HttpRequest, _body: Body) -> ImmediateResponse:
        self._store.open()
        return json_response(ScriptState(num_left=self._store.num_left()))

    def _tell_requests(self, _http: HttpRequest, _body: Body) -> ImmediateResponse:
        return ImmediateResponse(200, self._store.recorded())

    def _forget(self, _http: HttpRequest, _body: Body) -> ImmediateResponse:
        self._store.open()
        self._store.forget()
        return json_response(ScriptState(num_left=self._store.num_left()))

    def _handle(
        self, handler: Handler, http: HttpRequest, body: Body
    ) -> Stages | ImmediateResponse:
        """Answer as `handler` does, or as the script has it."""
        if not self._store.is_open:
            return handler(http, body)
        return self._stages(handler, http, body)

    def _stages(self, handler: Handler, http: HttpRequest, body: Body) -> Stages:
        try:
            fields = msgspec.json.decode(body, type=dict[str, Any])
        except BAD_JSON:
            return (yield from outcome_of(handler(http, body)))  # which says what is wrong
        self._store.record(http, fields)
        # Any name of a model will do: a script may tell them apart.
        model = fields.pop("model") if isinstance(fields.get("model"), str) else None
        answer: Undelayed | None = None
        interval_ms = 0
        if self._store.has_rules:
            taken = self._store.take(http, model, text_in(last_of(fields)))
            if isinstance(taken, Delay):
                yield from pause(taken.seconds)
                interval_ms, answer = round(taken.token_interval * 1000), taken.answer
            else:
                answer = taken
        if isinstance(answer, MockError) and (answer.after is None or not fields.get("stream")):
            return error_response(error_of(answer), http.path)
        try:
            planned = yield from outcome_of(handler(http, msgspec.json.encode(fields)))
            if isinstance(planned, ImmediateResponse):
                return planned
            planned = self._named(planned, model, None if answer is None else fault_of(answer))
            if answer is None:
                return planned
            return (yield from self._scripted(planned, answer, fields.get("seed"), interval_ms))
        except RequestError:
            self._store.give_back(http)
            raise

    def _named(
        self, planned: Sequences, model: str | None, fault: ResponseFault | None
    ) -> Sequences:
        """Return sequences whose response names the model that was asked for, and has a fault."""
        requests = []
        for request in planned.requests:
            plan = self._plan_of(request)
            plan = msgspec.structs.replace(plan, model=model or plan.model, fault=fault)
            requests.append(msgspec.structs.replace(request, plan=msgspec.msgpack.encode(plan)))
        return Sequences(requests, planned.prompts)

    def _plan_of(self, request: GenerateRequest) -> ResponsePlan:
        plan = self._plans.decode(request.plan)
        assert isinstance(plan, ResponsePlan)
        return plan

    def _scripted(
        self, planned: Sequences, answer: Undelayed, seed: Any, interval_ms: int
    ) -> Encoding[Sequences]:
        """Return sequences with the tokens of an answer."""
        pairs = zip(planned.requests, planned.prompts, strict=True)
        texts = [
            text_of(answer, self._plan_of(request), seed, bytes(prompt), index)
            for index, (request, prompt) in enumerate(pairs)
        ]
        encoded = yield [Text(text, add_special_tokens=False) for text in texts]
        requests = []
        for request, ids in zip(planned.requests, encoded, strict=True):
            limit = answer.num_tokens - 1 if isinstance(answer, Words) else len(ids)
            script = ScriptedTokens(self._tokens(request, ids[:limit]), interval_ms)
            requests.append(msgspec.structs.replace(request, script=script))
        return Sequences(requests, planned.prompts)

    def _tokens(self, request: GenerateRequest, ids: Ids) -> bytes:
        """Return the tokens of a text up to the first stop token, and one that ends it."""
        stops = request.stop_token_ids
        end = next((id for id in ids if id in stops), (stops or self._eos or [0])[0])
        said = array("I", takewhile(lambda id: id not in stops, ids))
        said.append(end)
        return said.tobytes()


def outcome_of(found: Stages | ImmediateResponse) -> Encoding[Outcome]:
    """Return what a handler comes to."""
    return found if isinstance(found, ImmediateResponse) else (yield from found)


def pause(seconds: float) -> Encoding[None]:
    """Lay the request aside for some time."""
    check: Check[bool] = Check()
    timer = threading.Timer(seconds, setattr, (check, "found", True))
    timer.daemon = True
    timer.start()
    yield check


def last_of(fields: Mapping[str, Any]) -> Any:
    """Return what is last in the field that has the prompt, in whichever API."""
    said = next((fields[name] for name in LAST if name in fields), "")
    return said[-1] if isinstance(said, list) and said else said


def text_in(said: Any) -> str:
    """Return the text of a message, of its parts, or of a tool's result."""
    match said:
        case str():
            return said
        case list():
            return "\n".join(filter(None, map(text_in, said)))
        case dict():
            return text_in(said.get("text") or said.get("content") or said.get("output"))
        case _:
            return ""


def text_of(answer: Undelayed, plan: ResponsePlan, seed: Any, prompt: bytes, index: int) -> str:
    """Return what the model writes for an answer."""
    match answer:
        case MockReply():
            return response_text(answer, plan.parsing)
        case MockToolCall():
            return response_text(MockReply(calls=[answer]), plan.parsing)
        case Words():
            return response_text(MockReply(words_of(answer, seed, prompt, index)), plan.parsing)
        case Malformed():
            return response_text(MockReply(answer.text), plan.parsing)
        case MockError():
            return response_text(MockReply(answer.after or ""), plan.parsing)


def fault_of(answer: Undelayed) -> ResponseFault | None:
    """Return what goes wrong at the end of an answer."""
    match answer:
        case Malformed(kind):
            return ResponseFault(FaultKind(kind))
        case MockError():
            error = error_of(answer)
            return ResponseFault(FaultKind.ERROR, error.status, str(error), error.type, error.code)
        case _:
            return None
