"""Selects the parser of a response's text, and the pieces that the client gets."""

import functools
from collections.abc import Callable

from headrace.detokenizer_proc.parsers.custom_tools import CustomToolParser
from headrace.detokenizer_proc.parsers.gemma4 import read_gemma4
from headrace.detokenizer_proc.parsers.glm import read_glm
from headrace.detokenizer_proc.parsers.harmony import read_harmony
from headrace.detokenizer_proc.parsers.hermes import read_hermes
from headrace.detokenizer_proc.parsers.json_call import Calls, NewId, new_call_id
from headrace.detokenizer_proc.parsers.llama3_json import read_llama3_json
from headrace.detokenizer_proc.parsers.mistral import new_mistral_id, read_mistral
from headrace.detokenizer_proc.parsers.pieces import (
    Arguments,
    Content,
    OutputParser,
    Piece,
    PlainParser,
    Thought,
    ToolCallStart,
)
from headrace.detokenizer_proc.parsers.pythonic import LFM2_MARKS, read_pythonic
from headrace.detokenizer_proc.parsers.sections import DEEPSEEK, KIMI_K2, read_sections
from headrace.detokenizer_proc.parsers.source import Reading, SourceParser, TextSource
from headrace.detokenizer_proc.parsers.special_marks import SpecialMarks
from headrace.detokenizer_proc.parsers.tagged import (
    DEEPSEEK_V32,
    MINIMAX_M2,
    QWEN3_CODER,
    SEED_OSS,
    StringParameters,
    read_tagged,
)
from headrace.detokenizer_proc.parsers.thinking import read_thinking
from headrace.ipc.messages import Parsing
from headrace.model.output_formats import (
    THOUGHT_MARKS,
    THOUGHT_TOKENS,
    TOOL_MARKS,
    ThoughtFormat,
    ToolFormat,
)

READERS: dict[ToolFormat, Callable[[TextSource, Calls], Reading[None]]] = {
    ToolFormat.HERMES: read_hermes,
    ToolFormat.LLAMA3_JSON: read_llama3_json,
    ToolFormat.MISTRAL: read_mistral,
    ToolFormat.PYTHONIC: read_pythonic,
    ToolFormat.DEEPSEEK_V3: functools.partial(read_sections, section=DEEPSEEK),
    ToolFormat.DEEPSEEK_V31: functools.partial(read_sections, section=DEEPSEEK),
    ToolFormat.KIMI_K2: functools.partial(read_sections, section=KIMI_K2),
    ToolFormat.GEMMA4: read_gemma4,
    ToolFormat.HARMONY: functools.partial(read_harmony, tells_thoughts=False),
    ToolFormat.LFM2: functools.partial(read_pythonic, marks=LFM2_MARKS),
}
# These need to know which parameters are strings.
TAGGED_READERS: dict[ToolFormat, Callable[[TextSource, Calls, StringParameters], Reading[None]]] = {
    ToolFormat.QWEN3_CODER: functools.partial(read_tagged, tags=QWEN3_CODER),
    ToolFormat.SEED_OSS: functools.partial(read_tagged, tags=SEED_OSS),
    ToolFormat.MINIMAX_M2: functools.partial(read_tagged, tags=MINIMAX_M2),
    ToolFormat.DEEPSEEK_V32: functools.partial(read_tagged, tags=DEEPSEEK_V32),
    ToolFormat.GLM45: read_glm,
}


def parser_of(
    parsing: Parsing | None, new_id: NewId | None = None, marks: SpecialMarks | None = None
) -> OutputParser:
    """Return the parser of one sequence, whose calls are named by `new_id`.

    Args:
        marks: which marks are special tokens; without, what spells a mark is one.
    """
    if parsing is None:
        return PlainParser()
    parser: OutputParser = SourceParser(
        functools.partial(read_output, parsing=parsing, new_id=new_id), marks or SpecialMarks()
    )
    if parsing.custom_tools:
        parser = CustomToolParser(parser, frozenset(parsing.custom_tools))
    if parsing.has_one_call or parsing.hides_thoughts:
        return SelectiveParser(parser, parsing)
    return parser


def read_output(source: TextSource, parsing: Parsing, new_id: NewId | None) -> Reading[None]:
    """Read thoughts, then calls, as far as there are formats for them."""
    then = functools.partial(read_calls, parsing=parsing, new_id=new_id)
    if parsing.thoughts is None:
        return then(source)
    if parsing.thoughts is ThoughtFormat.HARMONY:
        is_read = parsing.tools is ToolFormat.HARMONY
        return read_harmony(source, calls_of(parsing, new_id) if is_read else None, True)
    begin, end = THOUGHT_MARKS[parsing.thoughts]
    is_kimi = parsing.thoughts is ThoughtFormat.KIMI_K2 and parsing.tools is not None
    calls_begin = TOOL_MARKS[ToolFormat.KIMI_K2][:1] if is_kimi else ()
    return read_thinking(source, begin, end, parsing.begins_inside, then, calls_begin)


def read_calls(source: TextSource, parsing: Parsing, new_id: NewId | None) -> Reading[None]:
    """Read what comes after thoughts."""
    format = parsing.tools
    if format is None:
        return read_plain(source)
    calls = calls_of(parsing, new_id)
    if format in TAGGED_READERS:
        return TAGGED_READERS[format](source, calls, parsing.string_parameters)
    return READERS[format](source, calls)


def calls_of(parsing: Parsing, new_id: NewId | None) -> Calls:
    """Return the calls of an answer, of which there is none yet."""
    default = new_mistral_id if parsing.tools is ToolFormat.MISTRAL else new_call_id
    return Calls(new_id or default)


def read_plain(source: TextSource) -> Reading[None]:
    """Read an answer without calls."""
    yield from source.until((), Content)


class SelectiveParser:
    """A parser that drops some kinds of pieces."""

    def __init__(self, parser: OutputParser, parsing: Parsing) -> None:
        self._parser = parser
        self._parsing = parsing

    @property
    def thought(self) -> range:
        """The range of the reasoning in the text, delivered or not."""
        return self._parser.thought

    def feed(self, text: str) -> list[Piece]:
        """Take more text; return the part that is final."""
        return [piece for piece in self._parser.feed(text) if self._is_delivered(piece)]

    def flush(self) -> list[Piece]:
        """Return the remaining text at the end."""
        return [piece for piece in self._parser.flush() if self._is_delivered(piece)]

    def _is_delivered(self, piece: Piece) -> bool:
        match piece:
            case Thought():
                return not self._parsing.hides_thoughts
            case ToolCallStart(index) | Arguments(index):
                return index == 0 or not self._parsing.has_one_call
            case Content():
                return True


def marks_of(parsing: Parsing | None) -> frozenset[str]:
    """Return what a parser has to see, be it a special token."""
    if parsing is None:
        return frozenset()
    marks = TOOL_MARKS[parsing.tools] if parsing.tools else ()
    return frozenset((*marks, *(THOUGHT_TOKENS[parsing.thoughts] if parsing.thoughts else ())))
