"""Field restrictions in schemas beyond types: what a server of one model refuses.

What depends on the text of a prompt, or on how two numbers compare, no schema can say.
"""

from collections.abc import Iterator
from typing import Any

from headrace.ipc.messages import MAX_LOGPROBS
from headrace.model.sampling_parameters import PARAMETERS
from headrace.tokenizer_proc.requests import openai, responses, sglang
from headrace.tokenizer_proc.requests.constraints import NAMES as GRAMMAR_NAMES
from headrace.tokenizer_proc.requests.sampling import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_WORD_LENGTH,
    UNSUPPORTED,
)
from headrace.tokenizer_proc.requests.tools import MAX_TOOLS

Object = dict[str, Any]

# Fields that each kind of body has and always refuses, beside those of all.
NEVER: dict[str, tuple[str, ...]] = {
    "ChatRequest": openai.UNSUPPORTED,
    "GenerateBody": sglang.UNSUPPORTED,
    "ResponsesRequest": responses.UNSUPPORTED,
    "MessagesRequest": ("mcp_servers", "container"),
}
TAKEN = {"GenerateBody": ("lora_path",)}  # alone
NOT_EMPTY = {
    "ChatRequest": ("messages",),
    "MessagesRequest": ("messages",),
    "CountRequest": ("messages",),
    "CompletionRequest": ("prompt",),
    "EmbeddingRequest": ("input",),
    "ResponsesRequest": ("input",),
    "RerankRequest": ("documents",),
    "ScoreRequest": ("text_1", "text_2"),
    "GenerateBody": ("text", "input_ids"),
    "TokenizeRequest": ("messages",),
}
WITH_TEXT = {"CompletionRequest": ("prompt",), "GenerateBody": ("text",)}  # no text is no token
ONE_OF = {"GenerateBody": ("text", "input_ids"), "TokenizeRequest": ("prompt", "messages")}
TOKEN_IDS = {
    "CompletionRequest": ("prompt", "stop_token_ids", "allowed_token_ids"),
    "ChatRequest": ("stop_token_ids", "allowed_token_ids"),
    "EmbeddingRequest": ("input",),
    "GenerateBody": ("input_ids",),
    "SglangSamplingParams": ("stop_token_ids",),
    "DetokenizeRequest": ("tokens",),
}
WORD = {"minLength": 1, "maxLength": MAX_WORD_LENGTH}
ABOVE: dict[str, dict[str, Object]] = {
    name: {"number": {"exclusiveMinimum": one.low, "maximum": one.high}}
    for name, one in PARAMETERS.items()
    if one.excludes_low
}
# By field, and by what it may be, the schema beyond the type.
WHERE: dict[str, dict[str, Object]] = ABOVE | {
    "stop": {"string": WORD, "array": {"items": WORD, "maxItems": MAX_STOP_STRINGS}},
    "stop_sequences": {"array": {"items": WORD, "maxItems": MAX_STOP_STRINGS}},
    "bad_words": {"array": {"items": WORD, "maxItems": MAX_BAD_WORDS}},
    "stop_token_ids": {"array": {"maxItems": MAX_STOP_TOKEN_IDS}},
    "allowed_token_ids": {"array": {"minItems": 1}},
    "truncate_prompt_tokens": {"integer": {"not": {"const": 0}}},
    "rid": {"string": {"maxLength": sglang.MAX_ID_LENGTH}},
    "modalities": {"array": {"items": {"const": "text"}, "maxItems": 1}},
    "separate_reasoning": {"boolean": {"const": True}},
    "truncation": {"string": {"enum": ["auto", "disabled"]}},
    "include": {"array": {"items": {"enum": list(responses.INCLUDABLE)}}},
    "tools": {"array": {"maxItems": MAX_TOOLS}},
}
NULL, TEXT = {"type": "null"}, {"type": "string"}
IDS = {"type": "array", "items": {"type": "integer"}}
OFF = {"enum": [False, None]}
LOGPROBS = {"minimum": 0, "maximum": MAX_LOGPROBS}  # of a completion, whose field is a number


def add_needs(
    components: Object,
    vocab_size: int,
    follows_grammars: bool,
    offers: bool,
    absent: dict[str, set[str]],
) -> None:
    """Add to schemas, by name, what a server of one model needs of their fields.

    Args:
        vocab_size: of the model.
        follows_grammars: whether the engine does.
        offers: whether the model may be offered tools.
        absent: by kind of body, fields that this model has no use for.
    """
    for name in sorted({*NEVER, *NOT_EMPTY, *TOKEN_IDS} & components.keys()):
        fields: Object = components[name]["properties"]
        gone = never(name, follows_grammars, offers) | absent.get(name, set())
        for field in gone:
            fields.pop(field, None)
        add_limits(name, fields, vocab_size)
        relations = list(relations_of(fields))
        if relations:
            components[name]["allOf"] = relations
        if name in ONE_OF:
            components[name]["oneOf"] = [
                {"required": [field], "properties": {field: {"not": {"type": "null"}}}}
                for field in ONE_OF[name]
            ]


def add_limits(name: str, fields: Object, vocab_size: int) -> None:
    """Add to the fields of a kind of body how much there may be in each."""
    restrictions = WHERE | {"logit_bias": {"object": biases(vocab_size)}}
    if name == "CompletionRequest":
        restrictions["logprobs"] = {"integer": LOGPROBS}
    if name == "GenerateBody":
        ids = fields["input_ids"]["anyOf"]
        number, numbers = ids[0]["items"]["anyOf"]
        ids[:1] = [{"type": "array", "items": items} for items in (number, numbers)]
    for field in fields.keys() & restrictions.keys():
        narrow(fields[field], restrictions[field])
    for field in TOKEN_IDS.get(name, ()):
        bound_ids(fields[field], vocab_size)
    for field in NOT_EMPTY.get(name, ()):
        fill(fields[field])
    for field in WITH_TEXT.get(name, ()):
        with_text(fields[field])
    if "truncation_side" in fields:
        fields["truncation_side"] = {"enum": ["left", None], "default": None}


def never(name: str, follows_grammars: bool = True, offers: bool = True) -> set[str]:
    """Return the fields that a server refuses whatever is in them."""
    gone = {*UNSUPPORTED, *NEVER.get(name, ())} - {*TAKEN.get(name, ())}
    if not follows_grammars:
        gone |= {*GRAMMAR_NAMES, "output_config"}
    if name == "ResponsesRequest" and not follows_grammars:
        gone |= {"text"}
    if not (offers and follows_grammars):
        gone |= {"tool_choice", "function_call"}
    if not offers:
        gone |= {"tools", "functions"}
    return gone


def relations_of(fields: Object) -> Iterator[Object]:
    """Yield what fields exclude each other."""
    if {"stream_options", "prompt_logprobs"} <= fields.keys():
        streams = {"stream": {"const": True}, "prompt_logprobs": NULL}
        whole = {"stream": OFF, "stream_options": NULL}
        yield {"anyOf": [{"required": ["stream"], "properties": streams}, {"properties": whole}]}
    if {"logprobs", "top_logprobs"} <= fields.keys():
        restrictions = {"required": ["logprobs"], "properties": {"logprobs": {"const": True}}}
        yield {"anyOf": [{"properties": {"top_logprobs": {"enum": [0, None]}}}, restrictions]}
    if {"continue_final_message", "add_generation_prompt"} <= fields.keys():
        yield excluding(
            {"continue_final_message": {"const": False}}, {"add_generation_prompt": OFF}
        )
    if {"functions", "tools"} <= fields.keys():
        yield excluding({"functions": NULL}, {"tools": NULL, "tool_choice": NULL})
    if "suffix" in fields:
        yield excluding({"suffix": {"enum": ["", None]}}, {"truncate_prompt_tokens": NULL})
        yield excluding({"suffix": {"enum": ["", None]}}, {"echo": {"const": False}})
    if "input_ids" in fields:  # what is there for each prompt
        one = {"not": {"type": "array"}}
        several = {"text": {"not": TEXT}, "input_ids": {"not": IDS}}
        yield excluding(dict.fromkeys((*sglang.BY_PROMPT, "rid"), one), several)


def excluding(first: Object, second: Object) -> Object:
    """Return that fields have some forms, or that others have."""
    return {"anyOf": [{"properties": first}, {"properties": second}]}


def biases(vocab_size: int) -> Object:
    """Return what `logit_bias` may be: no more digits than the largest token id has."""
    return {
        "maxProperties": MAX_LOGIT_BIASES,
        "propertyNames": {"pattern": f"^[0-9]{{1,{len(str(vocab_size - 1)) - 1}}}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    }


def forms(field: Object) -> list[Object]:
    """Return what a field may be."""
    found: list[Object] = field.get("anyOf", [field])
    return found


def narrow(field: Object, restrictions: dict[str, Object]) -> None:
    """Add a field's restrictions, by type."""
    for form in forms(field):
        more = dict(restrictions.get(form.get("type", ""), {}))
        if "items" in more:
            form["items"] = form["items"] | more.pop("items")
        form |= more


def bound_ids(field: Object, vocab_size: int) -> None:
    """Have the numbers in a field be token ids."""
    for form in forms(field):
        if form.get("type") == "integer":
            form |= {"minimum": 0, "maximum": vocab_size - 1}
        elif "items" in form:
            bound_ids(form["items"], vocab_size)


def with_text(field: Object) -> None:
    """Have no text of a field be empty."""
    for form in forms(field):
        if form.get("type") == "string":
            form["minLength"] = 1
        elif "items" in form:
            with_text(form["items"])


def fill(field: Object) -> None:
    """Have a list not be empty, nor a list in it. A text may be: some tokenizers add a token."""
    for given in forms(field):
        if given.get("type") == "array":
            given["minItems"] = 1
            fill(given["items"])
