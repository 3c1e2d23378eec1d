r"""How byte-level BPE cuts a text before it merges, by GGUF's name of it (`tokenizer.ggml.pre`).

llama.cpp fixes the names, and the models' own tokenizers the patterns. Where llama.cpp writes a
pattern in simpler classes (`gpt-4o`, `tekken`), the model's own one stands here: it was trained so.
"""

# ruff: noqa: RUF001

from typing import Any, NamedTuple

Json = dict[str, Any]

# Alternatives of the patterns, from which most of them are made.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
MARKS_OR_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
NEWLINES = r"\s*[\r\n]+"
SPACES = r"\s+(?!\S)|\s+"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CJK = "[一-龥぀-ゟ゠-ヿ]+"
HAN_AND_HANGUL = "[一-龥ࠀ-一가-퟿]+"


def any_of(*alternatives: str) -> str:
    """Return a pattern that takes the first alternative that matches."""
    return "|".join(alternatives)


def llama3(digits: str) -> str:
    """Return Llama 3's pattern with another one for numbers."""
    return any_of(CONTRACTIONS, LETTERS, digits, MARKS, NEWLINES, SPACES)


def cased(digits: str, *, ending: str, upper: str = UPPER, lower: str = LOWER) -> list[str]:
    """Return alternatives that cut words where lower case goes over into upper case."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return [f"{lead}{upper}*{lower}+{ending}", f"{lead}{upper}+{lower}*{ending}", digits]


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT4O_WORDS = cased(r"\p{N}{1,3}", ending=CONTRACTIONS + "?")
GPT4O = any_of(*GPT4O_WORDS, MARKS_OR_PATHS, NEWLINES, SPACES)
TEKKEN = any_of(*cased(r"\p{N}", ending=""), MARKS_OR_PATHS, NEWLINES, SPACES)
DEEPSEEK3_WORDS = any_of(
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
)
DEEPSEEK3 = any_of(DEEPSEEK3_WORDS, r" ?[\p{P}\p{S}]+[\r\n]*", NEWLINES, SPACES)
DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-"
    "ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭ"
    "ℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
POWERS_OF_SPACES = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
SENTENCE_ENDS = r" ?[^(\s|.,!?…。，、।۔،)]+"
NOT_HAN = "&&[^\\p{Han}]]"
KIMI_K2_WORDS = cased(
    r"\p{N}{1,3}",
    ending=CONTRACTIONS + "?",
    upper=UPPER[:-1] + NOT_HAN,
    lower=LOWER[:-1] + NOT_HAN,
)


class PreTokenizer(NamedTuple):
    """A tokenizer's properties that a GGUF file gives by name only."""

    patterns: tuple[str, ...]  # each cuts what the ones before it left
    ignore_merges: bool = False  # a piece that is a token is that token, whatever the merges say
    add_bos: bool = False  # unless the file says otherwise

    def steps(self) -> list[Json]:
        """Return the steps of `tokenizer.json`: the cuts, then bytes as characters."""
        *before, last = self.patterns
        if last == GPT2:
            return [*map(split, before), byte_level(use_regex=True)]
        return [*map(split, self.patterns), byte_level(use_regex=False)]


def byte_level(use_regex: bool) -> Json:
    """Return the step that writes bytes as printable characters, GPT-2's splitting before it."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def split(pattern: str) -> Json:
    """Return the step that cuts out what matches a pattern."""
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def named(kind: PreTokenizer, names: str) -> dict[str, PreTokenizer]:
    """Return one pre-tokenizer under several names."""
    return dict.fromkeys(names.split(), kind)


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **named(
        PreTokenizer((GPT2,)),
        "gpt-2 phi-2 mpt olmo jais exaone4 trillion gigachat mellum modern-bert a.x-4.0 "
        "granite-docling roberta-bpe jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code",
    ),
    **named(
        PreTokenizer((r"\p{N}", GPT2)),
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    ),
    **named(
        PreTokenizer((llama3(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    ),
    **named(PreTokenizer((llama3(r"\p{N}{1,3}"),)), "dbrx smaug-bpe chatglm-bpe"),
    **named(PreTokenizer((llama3(r"\p{N}{1,3}"),), ignore_merges=True), "glm4 glm5"),
    **named(
        PreTokenizer((llama3(r"\p{N}"),)),
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    ),
    "qwen35": PreTokenizer(
        (
            any_of(
                CONTRACTIONS,
                r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
                r"\p{N}",
                r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
                NEWLINES,
                SPACES,
            ),
        )
    ),
    "ufakzeka": PreTokenizer((any_of(LETTERS, r"\p{N}", MARKS, NEWLINES, SPACES),)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", llama3(r"\p{N}"))),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", llama3(r"\p{N}+")), ignore_merges=True),
    "jais-2": PreTokenizer(
        (
            any_of(
                CONTRACTIONS,
                LETTERS,
                r"\p{N}{1,3}",
                MARKS,
                NEWLINES,
                POWERS_OF_SPACES,
                r"\s{1,2}(?!\S)",
                r"\s{1}",
            ),
        )
    ),
    "seed-coder": PreTokenizer(
        (any_of(CONTRACTIONS, LETTERS, r"\p{N}{1}", r" ?[^\s\p{L}\p{N}\r\n]+", NEWLINES, SPACES),)
    ),
    **named(
        PreTokenizer(
            (
                any_of(
                    r"'(?i:[sdmt]|ll|ve|re)",
                    r"[^\r\n\p{L}\p{N}]?+\p{L}+",
                    r"\p{N}",
                    r" ?[^\s\p{L}\p{N}]++[\r\n]*",
                    r"\s*[\r\n]",
                    SPACES,
                ),
            )
        ),
        "bailingmoe bailingmoe2 llada-moe",
    ),
    "exaone-moe": PreTokenizer(
        (
            any_of(
                CONTRACTIONS,
                r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                r"\p{N}",
                r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
                r"\s*[\r\n]",
                SPACES,
            ),
        )
    ),
    **named(PreTokenizer((GPT4O,)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    "granite-embed-multi-97m": PreTokenizer((GPT4O,), ignore_merges=True),
    **named(PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O)), "tiny_aya cohere2moe"),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True),
    "youtu": PreTokenizer(
        (
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
            any_of(*cased(r"\p{N}", ending=CONTRACTIONS + "?"), MARKS_OR_PATHS, NEWLINES, SPACES),
        ),
        ignore_merges=True,
    ),
    "kimi-k2": PreTokenizer((any_of(r"[\p{Han}]+", *KIMI_K2_WORDS, MARKS, NEWLINES, SPACES),)),
    "deepseek-llm": PreTokenizer(
        (
            "[\r\n]",
            rf"\s?[{DEEPSEEK_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            HAN_AND_HANGUL,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer(
        ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN_AND_HANGUL, r"\p{N}")
    ),
    **named(
        PreTokenizer((r"\p{N}{1,3}", CJK, DEEPSEEK3)),
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    ),
    "spark2_5": PreTokenizer(
        (
            r"\p{N}{1,3}",
            CJK,
            any_of(DEEPSEEK3_WORDS, r" ?[\p{P}\p{S}]+", r"[\r\n]", SPACES),
            r"\p{N}",
        )
    ),
    "afmoe": PreTokenizer(
        (
            r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
            "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
            DEEPSEEK3,
        )
    ),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    **named(PreTokenizer((SENTENCE_ENDS,)), "bloom poro-chat gpt3-finnish"),
    "viking": PreTokenizer((SENTENCE_ENDS, r"\p{N}")),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2,
        ),
        add_bos=True,
    ),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
}
