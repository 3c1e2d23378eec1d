"""Chat templates: a conversation as the text the model was trained on.

Templates come with models and are code. They run in Jinja's sandbox, with limited CPU time
(`cpu_limit.py`), in this process only. Those that come with a request have a limit of memory, too.
The environment follows `transformers` (trim_blocks, lstrip_blocks, loop controls, `generation`
blocks, `raise_exception`, `strftime_now`, `tojson` without escaping), so that templates written for
it render the same.
"""

import contextlib
import datetime
import json
import secrets
from typing import Any, NamedTuple, Protocol

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from headrace.errors import InvalidValue, ModelError, Unsupported, in_a_line
from headrace.model.own_templates import PAIR_ROLES, compares_pairs
from headrace.system.cpu_limit import CpuLimit, CpuLimitExceeded
from headrace.system.memory_limit import MemoryLimit
from headrace.tokenizer_proc.encoding.generic_tools import describe_tools, plain_messages
from headrace.tokenizer_proc.encoding.message_content import (
    add_text,
    parts_of,
    plain_text,
    with_images,
)
from headrace.tokenizer_proc.jobs.stages import Text
from headrace.tokenizer_proc.requests.constraints import JsonSchemaFormat
from headrace.tokenizer_proc.requests.openai import (
    IMAGE_PART,
    ChatRequest,
    ContentPart,
    RequestMessage,
)
from headrace.tokenizer_proc.requests.tools import as_template_call

OPTIONAL: dict[str, Any] = {"tools": None, "documents": None}  # as in transformers
REMEDIES = {
    "tools": "; with --tool-call-parser auto or hermes a message describes them",
    "documents": "; write them into a message",
}
PROBE = "headrace"
TEMPLATE_BYTES = 512 << 20  # that a request's own may take; a body has 32 MB at most
TEMPLATE_CPU_S = 2.0  # 30 MB of text take 0.03 s, 300,000 messages 0.7 s

# What Python code that a template calls may raise, beside Jinja's own errors.
TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class TemplateRefusal(jinja2.TemplateError):
    """The template itself refuses the conversation, through `raise_exception`."""


class TemplateTooSlow(InvalidValue):
    """The template has used its CPU time. A process with a higher limit may be asked."""


class GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` and its end, around the assistant's text in training; the content is
    rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Parse the block, which has its own scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise(message: str) -> None:
    raise TemplateRefusal(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


class Conversation(Protocol):
    """The variables of a template."""

    @property
    def messages(self) -> list[RequestMessage]:
        """The messages, in order."""
        ...

    @property
    def add_generation_prompt(self) -> bool | None:
        """Whether the prompt is ready for the assistant's answer; by default it is."""
        ...

    @property
    def continue_final_message(self) -> bool:
        """Whether the prompt ends where the last message does, to be continued."""
        ...

    @property
    def add_special_tokens(self) -> bool | None:
        """Whether special tokens go around the prompt; see `ChatTemplate.to_encode`."""
        ...

    @property
    def chat_template(self) -> str | None:
        """A template to use instead of the model's."""
        ...

    @property
    def variables(self) -> dict[str, Any]:
        """More variables, the client's, tools and documents among them."""
        ...

    @property
    def answer_format(self) -> JsonSchemaFormat | None:
        """The schema of the answer, which harmony alone writes into a prompt."""
        ...


class ChatTemplate:
    """A model's chat template, compiled once."""

    def __init__(
        self,
        source: str | None,
        special_tokens: dict[str, str],
        cpu_s: float = TEMPLATE_CPU_S,
        trusts_requests: bool = False,
        takes_images: bool = False,
        image_text: str = "",
        describes_tools: bool = False,
        patience_s: float | None = None,
        writes_special: bool = False,
    ) -> None:
        """Compile `source`; a model without a template refuses conversations.

        With `trusts_requests`, a request may bring a template of its own. With `takes_images`,
        messages may have image parts. With `image_text`, a template without a place for images gets
        that text for each. With `describes_tools`, a message describes tools that the template has
        no place for. With `patience_s`, a conversation has so much CPU time in place of `cpu_s`.
        With `writes_special`, the template itself has all special tokens around a prompt.

        Raises:
            ModelError: the template is not valid Jinja.
        """
        own_limit = CpuLimit(cpu_s)  # to compile the model's template
        self._limit = own_limit if patience_s is None else CpuLimit(patience_s, 2 * cpu_s)
        self._memory = MemoryLimit(TEMPLATE_BYTES)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationBlocks],
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        self._environment = environment
        self._trusts_requests = trusts_requests
        self._takes_images = takes_images
        self._adds_special = takes_images and not writes_special
        self._describes_tools = describes_tools
        self._wants_parts = False  # even for content that is a text
        self._image_text = ""  # of an image in content that is a text
        self._special_tokens = special_tokens
        try:
            self._template = None if source is None else self._compiled(source, own_limit)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the model's chat template, line {error.lineno}: {error}") from error
        except CpuLimitExceeded as error:
            raise ModelError(f"the model's chat template takes {error} to compile") from error
        self._wants_parts = takes_images and self._loses_text()
        if image_text and self._loses_images(image_text):
            self._wants_parts, self._image_text = False, image_text

    def _loses_text(self) -> bool:
        """Whether the model's template has no place for content that is not a list of parts."""
        probe = ChatRequest(messages=[RequestMessage("user", PROBE)])
        try:
            return self._template is not None and PROBE not in self.render(probe)
        except InvalidValue:
            return True

    def _loses_images(self, image_text: str) -> bool:
        """Whether the model's template has no place for the images of a message."""
        parts = [ContentPart(IMAGE_PART), ContentPart("text", PROBE)]
        probe = ChatRequest(messages=[RequestMessage("user", parts)])
        try:
            return self._template is not None and image_text not in self.render(probe)
        except InvalidValue:
            return True

    def render(self, request: Conversation) -> str:
        """Return the prompt of a conversation, by default ready for the assistant's answer.

        Raises:
            InvalidValue: the template does not take these messages, or is not valid itself.
            TemplateTooSlow: it takes too much CPU time for them, or to be compiled.
            Unsupported: the request brings a template, and is not trusted with it.
        """
        template = self._template_for(request)
        messages = [self._as_template_message(m, i) for i, m in enumerate(request.messages)]
        variables = OPTIONAL | self._special_tokens | request.variables
        if self._describes_tools and "tools" not in template.variables:
            messages = self._with_described_tools(template, messages, variables.pop("tools"))
        for name in OPTIONAL:
            if variables.get(name) and name not in template.variables:
                raise Unsupported(
                    f"{name}: the chat template has no place for them{REMEDIES[name]}", name
                )
        continues, begins = request.continue_final_message, request.add_generation_prompt
        variables |= {
            "messages": messages,
            "add_generation_prompt": not continues if begins is None else begins,
        }
        if not continues:
            return self._rendered(template, variables)
        # The mark ends with a space: a template that cuts it off cuts the message's own, too.
        mark = secrets.token_hex(8)
        add_text(messages[-1], mark + " ")
        text, found, rest = self._rendered(template, variables).rpartition(mark)
        if not found:
            raise InvalidValue(
                "continue_final_message: the chat template leaves the last message out; "
                "leave the field out",
                "continue_final_message",
            )
        return text if rest.startswith(" ") else text.rstrip()

    def prompt(self, request: Conversation) -> Text:
        """Return the prompt of a conversation, ready for encoding; raises as `render` does."""
        return self.to_encode(self.render(request), request.add_special_tokens)

    @property
    def compares_pairs(self) -> bool:
        """Whether the template prompts a reranker: it names the roles of a query and a document."""
        return self._template is not None and self._template.compares_pairs

    def render_pair(self, query: str, document: str) -> str:
        """Return the prompt that compares two texts; raises as `render` does."""
        messages = list(map(RequestMessage, PAIR_ROLES, (query, document)))
        return self.render(ChatRequest(messages=messages))

    @property
    def lacks_tools(self) -> bool:
        """Whether tools are described in a message, since the model's template lacks them."""
        template = self._template
        return self._describes_tools and template is not None and "tools" not in template.variables

    def _with_described_tools(
        self, template: "Compiled", messages: list[dict[str, Any]], tools: list[Any] | None
    ) -> list[dict[str, Any]]:
        """Return messages with the tool descriptions that the template cannot write."""
        if not template.writes_calls:
            messages = plain_messages(messages)
        if not tools:
            return messages
        return describe_tools(messages, tools, self._takes_system(template))

    def _takes_system(self, template: "Compiled") -> bool:
        """Whether a template has a place for a system message."""
        said = [{"role": "system", "content": PROBE}, {"role": "user", "content": "Hi"}]
        variables = OPTIONAL | self._special_tokens | {"messages": said}
        try:
            return PROBE in self._filled(template, {"add_generation_prompt": True} | variables)
        except (*TEMPLATE_FAILURES, MemoryError):
            return False

    def to_encode(self, text: str, special: bool | None = None) -> Text:
        """Return a rendered conversation ready for encoding.

        Args:
            special: whether special tokens go around it. None is the rule of transformers'
                processors: for models that take images, unless the text begins with one.
        """
        if special is None:
            first = self._special_tokens.get("bos_token")
            special = self._adds_special and not (first and text.startswith(first))
        return Text(text, special)

    def _as_template_message(self, message: RequestMessage, index: int) -> dict[str, Any]:
        where = f"messages[{index}].content"
        if self._image_text and isinstance(message.content, list):
            text = with_images(message, where, self._image_text)
            return as_template_message(message, index, text)
        has_parts = self._takes_images and isinstance(message.content, list)
        if self._wants_parts or has_parts:
            return as_template_message(message, index, parts_of(message, where))
        return as_template_message(message, index, plain_text(message, where))

    def _compiled(self, source: str, limit: CpuLimit) -> "Compiled":
        with limit:  # constants are computed here
            names = jinja2.meta.find_undeclared_variables(self._environment.parse(source))
            template = self._environment.from_string(source)
        # Every rendering copies them, and a ChainMap is slow to copy.
        template.globals = dict(template.globals)
        return Compiled(template, frozenset(names), "tool_calls" in source, compares_pairs(source))

    def _template_for(self, request: Conversation) -> "Compiled":
        source = request.chat_template
        if source is None:
            if self._template is None:
                raise InvalidValue(
                    "messages: this model has no chat template; use /v1/completions", "messages"
                )
            return self._template
        if not self._trusts_requests:
            raise Unsupported(
                "chat_template: this server takes none from requests "
                "(--trust-request-chat-template)",
                "chat_template",
            )
        try:
            with self._memory:
                return self._compiled(source, self._limit)
        except (jinja2.TemplateSyntaxError, RecursionError, CpuLimitExceeded) as error:
            kind = TemplateTooSlow if isinstance(error, CpuLimitExceeded) else InvalidValue
            raise kind(
                f"chat_template: cannot be compiled: {why_not_compiled(error)}", "chat_template"
            ) from error
        except MemoryError as error:
            raise too_much_memory() from error

    def _rendered(self, template: "Compiled", variables: dict[str, Any]) -> str:
        try:
            return self._filled(template, variables)
        except MemoryError as error:
            raise too_much_memory() from error
        except TemplateRefusal as error:
            raise InvalidValue(
                f"messages: the chat template refuses them: {error}", "messages"
            ) from error
        except TEMPLATE_FAILURES as error:
            raise InvalidValue(
                "messages: the chat template cannot render them; change their roles, order or "
                f"fields. Jinja says: {in_a_line(error)}",
                "messages",
            ) from error

    def _filled(self, template: "Compiled", variables: dict[str, Any]) -> str:
        """Render; some templates take arguments of calls in one form only, see `other_forms`, or
        look for something in a message's content."""
        try:
            return self._filled_in_time(template, variables)
        except CpuLimitExceeded as error:
            raise TemplateTooSlow(
                f"messages: the chat template takes {error} for them", "messages"
            ) from error

    def _filled_in_time(self, template: "Compiled", variables: dict[str, Any]) -> str:
        with self._limit, contextlib.nullcontext() if template is self._template else self._memory:
            try:
                return template.code.render(variables)
            except TEMPLATE_FAILURES as error:
                messages = variables["messages"]
                as_written = [one["arguments"] for one in functions_of(messages)]
                forms = other_forms(as_written, error)
                text = first_rendered(template, variables, forms)
                if text is None and with_empty_content(messages):
                    text = first_rendered(template, variables, [as_written, *forms])
                if text is None:
                    raise
                return text


def why_not_compiled(error: BaseException) -> str:
    """Return what is wrong with a template that a request has brought, and the remedy."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno} is not valid; mend it. Jinja says: {in_a_line(error)}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply; use fewer levels"
    return f"it takes {error}; leave out large constants"


def too_much_memory() -> InvalidValue:
    """The error for a template that a request has brought."""
    return InvalidValue(
        f"chat_template: takes more than {TEMPLATE_BYTES >> 20} MB of memory", "chat_template"
    )


class Compiled(NamedTuple):
    """A template, the names of the variables that it reads, and what it writes."""

    code: jinja2.Template
    variables: frozenset[str]
    writes_calls: bool
    compares_pairs: bool  # texts of the roles query and document


def as_template_message(
    message: RequestMessage, index: int, content: str | list[dict[str, str]] | None
) -> dict[str, Any]:
    """Return a message as templates expect it: absent fields absent."""
    fields: dict[str, Any] = {"role": message.role, "content": content}
    thoughts = {"reasoning_content": message.thoughts, "reasoning": message.thoughts}
    if not content:
        thoughts["thinking"] = message.thoughts  # harmony's, which wants one of the two
    optional = {"name": message.name, "tool_call_id": message.tool_call_id} | thoughts
    fields |= {name: value for name, value in optional.items() if value is not None}
    if message.tool_calls:
        where = f"messages[{index}].tool_calls"
        fields["tool_calls"] = [
            as_template_call(call, f"{where}[{i}]") for i, call in enumerate(message.tool_calls)
        ]
    return fields


def functions_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the functions that are called in a conversation."""
    return [call["function"] for message in messages for call in message.get("tool_calls", ())]


def first_rendered(
    template: "Compiled", variables: dict[str, Any], forms: list[list[Any]]
) -> str | None:
    """Render with the first form of calls' arguments that a template takes, if it takes any."""
    functions = functions_of(variables["messages"])
    for form in forms:
        for function, arguments in zip(functions, form, strict=True):
            function["arguments"] = arguments
        with contextlib.suppress(*TEMPLATE_FAILURES):
            text: str = template.code.render(variables)
            return text
    return None


def with_empty_content(messages: list[dict[str, Any]]) -> bool:
    """Make content that is not there an empty text; return whether there was some."""
    without = [message for message in messages if message.get("content", "") is None]
    for message in without:
        message["content"] = ""
    return bool(without)


def other_forms(arguments: list[Any], error: Exception) -> list[list[Any]]:
    """Return what else the arguments of calls may be after a template has failed with `error`.

    A template that adds them to a text wants JSON. One that iterates over their names wants
    objects, and gets an empty one for a truncated call.
    """
    forms: list[list[Any]] = []
    if isinstance(error, TypeError) and any(isinstance(one, dict) for one in arguments):
        forms.append([one if isinstance(one, str) else _to_json(one) for one in arguments])
    if any(isinstance(one, str) for one in arguments):
        forms.append([{} if isinstance(one, str) else one for one in arguments])
    return forms
