"""llguidance for one model, the same where a grammar is checked and where it is followed.

Imported when the first grammar comes: the library and its table of a vocabulary take 50 MB or more.
"""

from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from headrace.tokenizer_json import read_tokenizer_json

# What a text may take to be matched; one that takes more is cut off. Chosen so that no grammar that
# was tried takes more than 0.1 s in a step, most 0.1 ms, and those that people write are not hit.
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,  # an enum of 8,000 strings takes 100,000
    step_lexer_fuel=50_000,
    step_max_items=10_000,  # 6 ms
    max_lexer_states=50_000,  # some 100 MB
    verbose_errors=False,
)
NUM_TRIED = 4  # tokens


class GrammarCompiler:
    """Compiles grammars for a model's tokens."""

    def __init__(self, model_path: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        """Load the tokenizer of the model at `model_path`.

        Raises:
            ValueError: llguidance does not know tokenizers of this kind.
        """
        data = read_tokenizer_json(Path(model_path)).decode()
        self._tokenizer = LLTokenizer(data, n_vocab=vocab_size, eos_token=eos_token_ids)

    def compile(self, grammar: str) -> LLMatcher:
        """Return what a text has to match; copies of it share what is compiled.

        Raises:
            ValueError: the grammar is wrong, or too large; the text says how.
        """
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def check(self, grammar: str) -> None:
        """Compile a grammar and begin a text, for what is found only there.

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


def lowest(mask: bytes) -> int | None:
    """Return the lowest token that a mask allows."""
    for place, byte in enumerate(mask):
        if byte:
            return 8 * place + (byte & -byte).bit_length() - 1
    return None
