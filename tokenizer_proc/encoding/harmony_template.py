"""A conversation as gpt-oss was trained on it: as openai-harmony writes it, with its ids.

A prompt is in pieces that are encoded apart, so the name of a special token in a message is text.

Where harmony leaves a choice it is vLLM's. A system message is the developer's instructions.
Thoughts before the last final answer are dropped, so those of a tool loop without one are kept. A
call says its recipient before its channel. Schemas of answers stand behind the tools, as harmony's
documentation has them.
"""

import datetime
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from headrace.errors import InvalidValue, Unsupported
from headrace.system.cpu_limit import CpuLimitExceeded
from headrace.tokenizer_proc.encoding.chat_template import (
    ChatTemplate,
    Conversation,
    TemplateTooSlow,
)
from headrace.tokenizer_proc.encoding.message_content import parts_of, plain_text
from headrace.tokenizer_proc.encoding.typescript import type_of
from headrace.tokenizer_proc.jobs.stages import Text
from headrace.tokenizer_proc.requests.constraints import JsonSchemaFormat
from headrace.tokenizer_proc.requests.openai import RequestMessage
from headrace.tokenizer_proc.requests.tools import as_template_call

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL = "<|end|>", "<|call|>"
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
ASSISTANT, INSTRUCTION_ROLES = "assistant", ("system", "developer")

IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
CUTOFF = "Knowledge cutoff: 2024-06"
CHANNELS = (
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
)
CALLS_GO = "Calls to these tools must go to the commentary channel: 'functions'."
EFFORTS = ("low", "medium", "high")
NEAREST_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}  # of OpenAI's other models
UNNAMED_FORMAT = "response"
# Where the name of a special token would become one: the pattern of o200k cuts there itself.
WITHIN_NAMES = re.compile(r"(?<=<\|)(?=[a-z])")


class HarmonyFunction(msgspec.Struct):
    """What harmony writes of a function."""

    name: str
    description: str | None = None
    parameters: Any = None


class HarmonyTool(msgspec.Struct):
    """A function that may be called."""

    function: HarmonyFunction


class HarmonyMessage(NamedTuple):
    """A message, with its author, recipient and channel."""

    author: str  # a role, or a tool's name
    texts: list[str]  # each is encoded apart
    channel: str = ""
    recipient: str = ""
    constraint: str = ""  # the type of its text

    def pieces(self) -> Iterator[str]:
        """Yield its special tokens, and texts that are none."""
        yield START
        yield from apart(self.author)
        if self.recipient:
            yield from apart(f" to={self.recipient}")
        if self.channel:
            yield from (CHANNEL, self.channel)
        if self.constraint:
            yield from (" ", CONSTRAIN, self.constraint)
        yield MESSAGE
        for text in self.texts:
            yield from apart(text)
        yield CALL if self.author == ASSISTANT and self.recipient else END


class HarmonyTemplate(ChatTemplate):
    """The template of gpt-oss; a request that is trusted may bring another."""

    def __init__(
        self,
        special_tokens: dict[str, str],
        trusts_requests: bool = False,
        patience_s: float | None = None,
    ) -> None:
        """See `ChatTemplate`."""
        super().__init__(
            None, special_tokens, trusts_requests=trusts_requests, patience_s=patience_s
        )

    def render(self, request: Conversation) -> str:
        """Return the prompt of a conversation.

        Raises:
            InvalidValue: a message, or `reasoning_effort`, is none that harmony has.
            TemplateTooSlow: it takes too much CPU time.
            Unsupported: it has documents or built-in tools, or an untrusted template.
        """
        if request.chat_template is not None:
            return super().render(request)
        return "".join(self._pieces(request))

    def prompt(self, request: Conversation) -> Text:
        """Return the prompt of a conversation in pieces; raises as `render` does."""
        if request.chat_template is not None:
            return super().prompt(request)
        pieces = tuple(self._pieces(request))
        return Text("".join(pieces), add_special_tokens=False, pieces=pieces)

    def _pieces(self, request: Conversation) -> list[str]:
        refuse_variables(request.variables)
        try:
            with self._limit:
                return pieces_of(request)
        except CpuLimitExceeded as error:
            raise TemplateTooSlow(
                f"messages: harmony takes {error} for them", "messages"
            ) from error
        except RecursionError as error:
            raise InvalidValue(
                "tools: a schema is nested too deeply; use fewer levels", "tools"
            ) from error


def refuse_variables(variables: dict[str, Any]) -> None:
    """Refuse what harmony has no place for, and what only a template writes."""
    for name in ("documents", "builtin_tools"):
        if variables.get(name):
            raise Unsupported(
                f"{name}: harmony writes this model's chats, and has no place for it; leave it "
                "out, or start the server with --chat-template",
                name,
            )


def pieces_of(request: Conversation) -> list[str]:
    """Return the pieces of a prompt."""
    messages = [*preamble(request), *conversation(request.messages)]
    if request.continue_final_message and is_empty(request.messages[-1]):
        raise InvalidValue(
            "continue_final_message: the last message is empty; leave the field out",
            "continue_final_message",
        )
    ended = messages[:-1] if request.continue_final_message else messages
    finals = [i for i, one in enumerate(ended) if one.channel == FINAL]
    kept = finals[-1] if finals else 0
    pieces = [
        piece
        for i, message in enumerate(messages)
        if i >= kept or message.channel != ANALYSIS
        for piece in message.pieces()
    ]
    if request.continue_final_message:
        return pieces[:-1]
    return pieces if request.add_generation_prompt is False else [*pieces, START, ASSISTANT]


def is_empty(message: RequestMessage) -> bool:
    """Whether a message of the assistant has nothing to write."""
    has_some = message.thoughts or message.tool_calls or any(texts_of(message, -1))
    return message.role == ASSISTANT and not has_some


def preamble(request: Conversation) -> Iterator[HarmonyMessage]:
    """Yield the system message, and the developer's with instructions, tools and a schema."""
    variables, first = request.variables, request.messages[0]
    tools = tools_of(variables)
    yield HarmonyMessage("system", [system_text(variables, bool(tools))])
    sections = []
    if first.role in INSTRUCTION_ROLES:
        sections.append(instructions("".join(texts_of(first, 0))))
    if tools:
        sections.append(tools_text(tool.function for tool in tools))
    if (wanted := request.answer_format) is not None and wanted.schema is not None:
        sections.append(format_text(wanted))
    if sections:
        yield HarmonyMessage("developer", ["\n\n".join(sections)])


def tools_of(variables: dict[str, Any]) -> list[HarmonyTool]:
    """Return the tools, which `chat_template_kwargs` may have unchecked."""
    try:
        return msgspec.convert(variables.get("tools") or [], list[HarmonyTool])
    except msgspec.ValidationError as error:
        raise InvalidValue(f"tools: {error}", "tools") from None


def system_text(variables: dict[str, Any], has_tools: bool) -> str:
    """Return what the model is told of itself."""
    effort = variables.get("reasoning_effort") or "medium"
    identity = variables.get("model_identity") or IDENTITY
    if isinstance(effort, str):
        effort = NEAREST_EFFORTS.get(effort, effort)
    if effort not in EFFORTS:
        raise InvalidValue(
            f"reasoning_effort: must be one of {', '.join(EFFORTS)}, not {effort!r:.40}",
            "reasoning_effort",
        )
    if not isinstance(identity, str):
        raise InvalidValue("model_identity: must be a string", "model_identity")
    date = f"Current date: {datetime.date.today().isoformat()}"
    channels = f"{CHANNELS}\n{CALLS_GO}" if has_tools else CHANNELS
    return f"{identity}\n{CUTOFF}\n{date}\n\nReasoning: {effort}\n\n{channels}"


def instructions(text: str) -> str:
    """Return the section of instructions."""
    return f"# Instructions\n\n{text}"


def tools_text(functions: Iterable[HarmonyFunction]) -> str:
    """Return the section that describes functions, in TypeScript."""
    lines = ["# Tools\n\n## functions\n\nnamespace functions {\n"]
    for function in functions:
        lines += comment_lines(function.description or "")
        schema = function.parameters
        parameters = "" if schema is None else f"_: {type_of(schema)}"
        lines.append(f"type {function.name} = ({parameters}) => any;\n")
    return "\n".join([*lines, "} // namespace functions"])


def format_text(wanted: JsonSchemaFormat) -> str:
    """Return the section with the schema of an answer."""
    lines = comment_lines(wanted.description or "")
    schema = msgspec.json.encode(wanted.schema).decode()
    title = f"# Response Formats\n\n## {wanted.name or UNNAMED_FORMAT}\n"
    return "\n".join([title, *lines, schema])


def comment_lines(text: str) -> list[str]:
    """Return the lines of a text as comments; a line feed at its end begins no line."""
    *lines, last = text.split("\n")
    lines = [line.removesuffix("\r") for line in lines]
    return [f"// {line}" for line in (*lines, *([last] if last else []))]


def conversation(messages: list[RequestMessage]) -> Iterator[HarmonyMessage]:
    """Yield the messages after the preamble, which has the instructions that come first."""
    called: dict[str | None, str] = {}  # names by the ids of calls
    for place, message in enumerate(messages):
        match message.role:
            case "system" | "developer":
                if place > 0:
                    text = instructions("".join(texts_of(message, place)))
                    yield HarmonyMessage("developer", [text])
            case "user":
                yield HarmonyMessage("user", texts_of(message, place))
            case "assistant":
                yield from answers(message, place, called)
            case "tool":
                yield result(message, place, called)
            case role:
                raise InvalidValue(
                    f"messages[{place}].role: must be system, developer, user, assistant or tool, "
                    f"not {role!r:.40}",
                    f"messages[{place}].role",
                )


def answers(
    message: RequestMessage, place: int, called: dict[str | None, str]
) -> Iterator[HarmonyMessage]:
    """Yield a message of the assistant: thoughts, then calls with words before, or an answer."""
    if message.thoughts:
        yield HarmonyMessage(ASSISTANT, [message.thoughts], ANALYSIS)
    texts = texts_of(message, place)
    if not message.tool_calls:
        if any(texts):
            yield HarmonyMessage(ASSISTANT, texts, FINAL)
        return
    if text := "".join(texts):
        yield HarmonyMessage(ASSISTANT, [text], COMMENTARY)
    for index, call in enumerate(message.tool_calls):
        function = as_template_call(call, f"messages[{place}].tool_calls[{index}]")["function"]
        name, written = function["name"], call.function and call.function.arguments
        if not isinstance(written, str):
            written = msgspec.json.encode(function["arguments"]).decode()
        called[call.id] = name
        yield HarmonyMessage(ASSISTANT, [written], COMMENTARY, f"functions.{name}", "json")


def result(message: RequestMessage, place: int, called: dict[str | None, str]) -> HarmonyMessage:
    """Return what a call has come to."""
    name = called.get(message.tool_call_id, message.name)
    if name is None:
        raise InvalidValue(
            f"messages[{place}].tool_call_id: no call before it has this id; name one that has",
            f"messages[{place}].tool_call_id",
        )
    text = "".join(texts_of(message, place))
    return HarmonyMessage(f"functions.{name}", [text], COMMENTARY, ASSISTANT)


def texts_of(message: RequestMessage, place: int) -> list[str]:
    """Return the texts of a message: of its parts, or one."""
    where = f"messages[{place}].content"
    plain_text(message, where)  # to check it
    return [part["text"] for part in parts_of(message, where)]


def apart(text: str) -> list[str]:
    """Return a text in pieces of which none spells a special token."""
    return [piece for piece in WITHIN_NAMES.split(text) if piece] if "<|" in text else [text]
