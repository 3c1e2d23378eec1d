"""Fill in the middle: a prompt of what comes before a place and what comes after it.

A model that is trained for it has tokens that mark both, and one after which it writes what belongs
between. GGUF files may name them (`tokenizer.ggml.fim_pre_token_id`); else their spellings tell.
Pure.
"""

from collections.abc import Mapping
from typing import NamedTuple

from headrace.tokenizer_proc.jobs.stages import Ids, ids_of

# Before, after, and where the answer begins. A model without the third writes what is after first.
SPELLINGS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite, SmolLM's kin
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("[PREFIX]", "[SUFFIX]", ""),  # Codestral
)
# What a model writes after the middle, beside EOS: that the file, or the repository, goes on.
ENDS = (
    "<|endoftext|>", "<|end_of_text|>", "<EOT>", "▁<EOT>",
    "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<PAD>",
    "<|repo_name|>", "<repo_name>", "<reponame>", "<fim-repo>", "<REPO>",
    "<|file_sep|>", "<file_sep>", "<|file_separator|>", "<filename>",
)  # fmt: skip
ROLES = ("pre", "suf", "mid")  # of the tokens as GGUF names them, in the order above
END_ROLES = ("pad", "rep", "sep")
# Before a text that SentencePiece would put a space before, and cut off: no token goes across it.
LEAD = "\N{WHITE SMILING FACE}"
LOOKED_FOR = frozenset((*ENDS, *(text for row in SPELLINGS for text in row if text)))


class Infilling(NamedTuple):
    """The tokens with which a model fills in."""

    before: int
    after: int
    middle: int | None  # None is that what is after goes first
    ends: list[int]  # of what is filled in, beside EOS

    def prompt(self, begin: Ids, before: Ids, after: Ids) -> Ids:
        """Return the prompt for the middle of two texts; `begin` starts every prompt."""
        if before[: len(begin)] == begin:
            before = before[len(begin) :]
        first = bytes(ids_of([self.before])) + bytes(before)
        second = bytes(ids_of([self.after])) + bytes(after)
        if self.middle is None:
            whole = bytes(begin) + second + first
        else:
            whole = bytes(begin) + first + second + bytes(ids_of([self.middle]))
        return memoryview(whole).cast("I")


def infilling_of(named: Mapping[str, int], spelled: Mapping[str, int]) -> Infilling | None:
    """Return how a model fills in, if it has tokens for it.

    Args:
        named: ids by role, as a GGUF file says.
        spelled: the ids of those of `LOOKED_FOR` that the vocabulary has.
    """
    marks = marks_of(named, spelled)
    if marks is None:
        return None
    before, after, middle = marks
    ends = {id for text, id in spelled.items() if text in ENDS}
    ends |= {named[role] for role in END_ROLES if role in named}
    return Infilling(before, after, middle, sorted(ends | {id for id in marks if id is not None}))


def marks_of(
    named: Mapping[str, int], spelled: Mapping[str, int]
) -> tuple[int, int, int | None] | None:
    """Return the tokens before, after and in the middle, as `SPELLINGS` has them."""
    if all(role in named for role in ROLES):
        return named["pre"], named["suf"], named["mid"]
    for before, after, middle in SPELLINGS:
        if all(text in spelled for text in (before, after, middle) if text):
            return spelled[before], spelled[after], spelled[middle] if middle else None
    return None
