"""llguidance for one model, the same where a grammar is checked and where it is followed.

Imported when the first grammar comes: the library and its table of a vocabulary take 50 MB or more.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from headrace.model.token_table import TokenTable, read_table
from headrace.model.tokenizer_json import read_tokenizer_spec

# What a text may take to be matched; a text that takes more fails. Chosen so that no tried grammar
# takes more than 0.1 s in a step, and most take 0.1 ms. Grammars that people write do not reach
# them.
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,  # an enum of 8,000 strings takes 100,000
    step_lexer_fuel=50_000,
    step_max_items=10_000,  # 6 ms
    max_lexer_states=50_000,  # some 100 MB
    verbose_errors=False,
)
NUM_TRIED = 4  # tokens
SPECIAL_MARK = b"\xff"  # llguidance's, before the name of a token that is no part of a text

Step = dict[str, Any]  # of a `tokenizer.json`


class GrammarCompiler:
    """Compiles grammars for a model's tokens."""

    def __init__(self, model_path: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        """Load the tokenizer of the model at `model_path`.

        Raises:
            ValueError: no grammar can be followed with a tokenizer of this kind.
        """
        spec = read_tokenizer_spec(Path(model_path))
        table = read_table(spec)
        if table is None:
            raise ValueError("its tokens are neither byte-level nor SentencePiece with all bytes")
        ends = [id for id in eos_token_ids if id < vocab_size]
        if not ends:
            raise ValueError(f"EOS {eos_token_ids} is none of the model's {vocab_size} tokens")
        self._tokenizer = TextTokens(spec, table, vocab_size, ends).compiled()

    def compile(self, grammar: str) -> LLMatcher:
        """Return a matcher of the grammar; copies of it share the compiled grammar.

        Raises:
            ValueError: the grammar is wrong, or too large; the text says how.
        """
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def check(self, grammar: str) -> None:
        """Compile a grammar and begin a text, to find errors that appear only then.

        Raises:
            ValueError: as `compile` does.
        """
        matcher = self.compile(grammar)
        for _ in range(NUM_TRIED):
            token = lowest(matcher.compute_bitmask())
            if matcher.is_stopped() or token is None:
                break
            matcher.consume_token(token)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        matcher.reset()
        if lowest(matcher.compute_bitmask()) is None:
            raise ValueError("no text matches it")


class TextTokens:
    """A vocabulary as llguidance's `TokenizerWrapper` takes it.

    Special tokens and EOS are no part of a text. All others stand for their bytes, added tokens
    such as Qwen's `<tool_call>` and Gemma's `<h1>` included.
    """

    bos_token_id = None

    def __init__(
        self, spec: Step, table: TokenTable, vocab_size: int, eos_token_ids: list[int]
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self.eos_token_id = eos_token_ids[0]
        self.tokens = [SPECIAL_MARK + b"<[%d]>" % id for id in range(vocab_size)]  # until known
        special = table.special.union(eos_token_ids)
        for id, token in enumerate(table.token_bytes[:vocab_size]):
            if token:
                self.tokens[id] = SPECIAL_MARK + token if id in special else token
        encoded = msgspec.json.encode(without_prefix(spec))
        self._tokenizer = tokenizers.Tokenizer.from_buffer(encoded)
        self._tokenizer.encode_special_tokens = True  # their names in a text are text
        self._compiled: LLTokenizer | None = None

    def compiled(self) -> LLTokenizer:
        """Return llguidance's tokenizer of these tokens."""
        self._compiled = LLTokenizer(TokenizerWrapper(self), eos_token=self._eos_token_ids)
        return self._compiled

    def __call__(self, data: bytes) -> list[int]:
        """Return the tokens of a text that a grammar demands, as the model has learned them.

        Some tokenizers change a text, by NFC for example. The longest tokens that spell the text
        as it is take the place of theirs.
        """
        text = data.decode()
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._compiled is None or self._spells(ids, data):
            return ids
        return self._compiled.greedy_tokenize(text)

    def _spells(self, ids: Iterable[int], data: bytes) -> bool:
        """Whether tokens are there, and are the text."""
        size = len(self.tokens)
        return b"".join(self.tokens[id] if id < size else SPECIAL_MARK for id in ids) == data


def without_prefix(spec: Step) -> Step:
    """Return a tokenizer that puts nothing before a text, cuts nothing off and fills nothing up."""
    return spec | {
        "normalizer": prefixless(spec.get("normalizer"), "normalizers"),
        "pre_tokenizer": prefixless(spec.get("pre_tokenizer"), "pretokenizers"),
        "truncation": None,
        "padding": None,
    }


def prefixless(step: Step | None, parts: str) -> Step | None:
    """Return a step, or a sequence of `parts`, that puts nothing before a text; None is no step."""
    if step is None or step["type"] == "Prepend":
        return None
    match step["type"]:
        case "Sequence":
            kept = [found for part in step[parts] if (found := prefixless(part, parts))]
            return {**step, parts: kept} if kept else None
        case "Metaspace":
            return {**step, "prepend_scheme": "never"}
        case "ByteLevel":
            return {**step, "add_prefix_space": False}
    return step


def lowest(mask: bytes) -> int | None:
    """Return the lowest token that a mask allows."""
    for place, byte in enumerate(mask):
        if byte:
            return 8 * place + (byte & -byte).bit_length() - 1
    return None
