"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, in vLLM's form and SGLang's.

An adapter is added to the registry, then one token runs through it. So the response says whether
the workers could load it.
"""

import msgspec

from headrace import routes
from headrace.errors import InvalidValue, ModelNotFound
from headrace.ipc.adapter_registry import AdapterRegistry
from headrace.ipc.messages import (
    AdapterPlan,
    AdapterSource,
    GenerateRequest,
    HttpRequest,
    Sampling,
    detokenizer_of,
)
from headrace.tokenizer_proc.jobs.stages import (
    Body,
    Handler,
    ImmediateResponse,
    Sequences,
    Stages,
    ids_of,
)
from headrace.tokenizer_proc.requests.adapters import LoadLora, UnloadLora, decoded

TEXT = "text/plain; charset=utf-8"
FIRST_TOKEN = 0  # any is as good


class LoraUpdate(msgspec.Struct):
    """SGLang's response to both."""

    success: bool
    loaded_adapters: dict[str, str]  # paths by name


class AdapterRoutes:
    """The handlers of a server that serves adapters."""

    def __init__(self, registry: AdapterRegistry, model: str, num_detokenizers: int) -> None:
        self._registry = registry
        self._model = model
        self._num_detokenizers = num_detokenizers
        self._plans = msgspec.msgpack.Encoder()

    @property
    def handlers(self) -> dict[str, Handler]:
        """The handler of each route."""
        return {routes.LOAD_LORA: self.load, routes.UNLOAD_LORA: self.unload}

    def load(self, http: HttpRequest, body: Body) -> Stages:
        """Add an adapter, and have the workers load it."""
        request = decoded(body, LoadLora)
        name, before = request.lora_name, self._registry.find(request.lora_name)
        if name == self._model:
            raise InvalidValue(f"lora_name: {name!r} is the name of the model", "lora_name")
        source = self._registry.add(name, request.lora_path)
        is_other = before is not None and before.digest != source.digest
        if before is not None and is_other and not request.load_inplace:
            self._registry.add(name, before.path)
            raise InvalidValue(
                f"lora_name: {name!r} is loaded already, from {before.path}; unload it, or send "
                "load_inplace",
                "lora_name",
            )
        yield []  # no text is encoded
        return Sequences([self._trial(http, source)], [ids_of([FIRST_TOKEN])])

    def _trial(self, http: HttpRequest, source: AdapterSource) -> GenerateRequest:
        """Return the sequence whose end says that an adapter is loaded."""
        text = f"Success: LoRA adapter '{source.name}' added successfully."
        return GenerateRequest(
            id=http.id,
            detokenizer=detokenizer_of(http.id, self._num_detokenizers),
            max_tokens=0,
            sampling=Sampling(),
            stop_token_ids=[],
            plan=self._plans.encode(AdapterPlan(*self._answer(http, text))),
            key=http.key,
            salt=source.digest,
            resumes=http.resumes,
            earlier=http.earlier,
            adapter=source,
        )

    def unload(self, http: HttpRequest, body: Body) -> ImmediateResponse:
        """Remove an adapter. Sequences that have it go on; workers drop it when they need room."""
        name = decoded(body, UnloadLora).lora_name
        if not self._registry.remove(name) and not http.origin:
            raise ModelNotFound(name, self._model)
        answer, content_type = self._answer(
            http, f"Success: LoRA adapter '{name}' removed successfully."
        )
        return ImmediateResponse(200, answer.encode(), content_type)

    def _answer(self, http: HttpRequest, text: str) -> tuple[str, str]:
        """Return a response's body and content type: vLLM's text, or SGLang's JSON."""
        if http.path in (routes.LOAD_LORA, routes.UNLOAD_LORA):
            return text, TEXT
        update = LoraUpdate(True, {source.name: source.path for source in self._registry})
        return msgspec.json.encode(update).decode(), "application/json"
