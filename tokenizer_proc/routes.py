"""Routing of paths to handlers. Early answers are made here; generation goes to the engine."""

from typing import TYPE_CHECKING

from headrace.config.process_configs import ModelCard, TokenizerConfig
from headrace.errors import MethodNotAllowed, RouteNotFound, WrongKind
from headrace.ipc.messages import HttpRequest
from headrace.model.output_formats import ToolFormat
from headrace.model.own_templates import own_template
from headrace.routes import (
    GET,
    HEAD,
    LOAD_LORA,
    POST,
    UNLOAD_LORA,
    Lane,
    by_path,
    routes_of,
)
from headrace.tokenizer_proc.adapter_routes import AdapterRoutes
from headrace.tokenizer_proc.embedding_planner import EmbeddingPlanner
from headrace.tokenizer_proc.encoding.chat_template import ChatTemplate
from headrace.tokenizer_proc.encoding.encoder import Encoder
from headrace.tokenizer_proc.encoding.harmony_template import HarmonyTemplate
from headrace.tokenizer_proc.generation import GenerationPlanner
from headrace.tokenizer_proc.grammar.grammars import Grammars
from headrace.tokenizer_proc.images.images import Images
from headrace.tokenizer_proc.info_routes import InfoRoutes, registry_of
from headrace.tokenizer_proc.jobs.stages import Body, Handler, ImmediateResponse, Stages
from headrace.tokenizer_proc.tokenize_routes import TokenRoutes

if TYPE_CHECKING:
    from headrace.tokenizer_proc.scripts.scripted_routes import ScriptedRoutes


class Routes:
    """The HTTP surface of one model, but for `/health` and `/ready`."""

    def __init__(
        self,
        about: InfoRoutes,
        generation: GenerationPlanner,
        embedding: EmbeddingPlanner,
        tokens: TokenRoutes,
        scripted: "ScriptedRoutes | None" = None,
        adapters: AdapterRoutes | None = None,
    ) -> None:
        self._about = about
        handlers = generation.handlers | embedding.handlers | tokens.handlers
        handlers |= dict.fromkeys((LOAD_LORA, UNLOAD_LORA), refuse_adapters)
        if adapters is not None:
            handlers |= adapters.handlers
        if scripted is not None:
            handlers = scripted.wrapped(handlers)
        posted = by_path(handlers, routes_of(Lane.TOKENIZER))
        self.handlers: dict[str, dict[str, Handler]] = {
            **{path: {POST: handler} for path, handler in posted.items()},
            **{path: {GET: handler} for path, handler in about.handlers.items()},
            **({} if scripted is None else scripted.handlers),
        }

    def handle(self, request: HttpRequest, body: Body) -> Stages:
        """Answer a request, or return the sequences for the engine.

        Raises:
            RequestError: it is refused.
        """
        found = self._find(request)(request, body)
        return found if isinstance(found, ImmediateResponse) else (yield from found)

    def _find(self, request: HttpRequest) -> Handler:
        methods = self.handlers.get(request.path)
        if methods is None and (handler := self._about.find(request.path)):
            methods = {GET: handler}
        if methods is None:
            raise RouteNotFound(request.path)
        method = GET if request.method == HEAD else request.method
        if method not in methods:
            raise MethodNotAllowed(request.method, request.path, ", ".join(methods))
        return methods[method]


def refuse_adapters(_http: HttpRequest, _body: Body) -> ImmediateResponse:
    """Refuse a request to a server without adapters."""
    raise WrongKind("this server serves no adapters; start it with --enable-lora")


def load_scripted(config: TokenizerConfig, card: ModelCard) -> "ScriptedRoutes | None":
    """Return the routes of a mock engine's scripts; other servers do not load the code."""
    if not config.takes_scripts:
        return None
    from headrace.tokenizer_proc.scripts.scripted_routes import ScriptedRoutes

    return ScriptedRoutes(config.run_dir, card.eos_token_ids)


def load_template(
    config: TokenizerConfig, card: ModelCard, patience_s: float | None = None
) -> ChatTemplate:
    """Return a model's chat template; `patience_s` is as `ChatTemplate` has it."""
    if card.mistral_tokenizer is not None:
        from headrace.tokenizer_proc.encoding.mistral_template import MistralTemplate

        return MistralTemplate(
            card.mistral_tokenizer, card.special_tokens, patience_s, card.takes_images
        )
    if card.writes_harmony:
        return HarmonyTemplate(card.special_tokens, config.trust_request_chat_template, patience_s)
    return ChatTemplate(
        card.chat_template,
        card.special_tokens,
        trusts_requests=config.trust_request_chat_template,
        takes_images=card.takes_images,
        image_text=card.image_text,
        describes_tools=card.tool_format is ToolFormat.HERMES,
        patience_s=patience_s,
        writes_special=card.is_prefix_lm and card.chat_template == own_template("paligemma"),
    )


def load_routes(
    config: TokenizerConfig,
    card: ModelCard,
    about: InfoRoutes,
    template: ChatTemplate,
    encoder: Encoder,
    grammars: Grammars,
    images: Images | None = None,
    scripted: "ScriptedRoutes | None" = None,
) -> Routes:
    """Return the routes of one model, and all that plans their requests."""
    num = config.num_detokenizers
    registry = registry_of(config)
    generation = GenerationPlanner(
        card, template, encoder, num, config.seed, grammars, images, config.traces, registry
    )
    embedding = EmbeddingPlanner(card, template, encoder, num)
    tokens = TokenRoutes(card, template, encoder, images, registry)
    adapters = None if registry is None else AdapterRoutes(registry, card.name, num)
    return Routes(about, generation, embedding, tokens, scripted, adapters)
