"""What schemathesis checks and sends beside its own.

A 400 to what the schema allows has a reason that no schema can state. Rules between two fields, and
what a text has to be, are kept to by changing the bodies before they are sent.
"""

import base64
import json
import re
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import schemathesis
from schemathesis import Case, CheckContext, HookContext, Response

MAX_SEQUENCES = 128  # of a request
DEFAULT_TOKENS = 16  # of a completion that says nothing
MAX_TOKENS = ("max_completion_tokens", "max_tokens", "max_new_tokens")
MIN_TOKENS = ("min_tokens", "min_new_tokens")
MAX_NAME = 64  # characters of a tool's
BY_PROMPT = ("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "rid")

# Why what the schema allows is refused; each says why no schema can state it.
REASONS = re.compile(
    # How many tokens a text has is known by the tokenizer alone.
    r"maximum context length is|context of \d+"
    # A product of fields is bounded: sequences, tokens of each, likeliest tokens of each.
    r"|log probabilities .* are more than"
)

FIELD = re.compile(r"([a-z_0-9]+)(?:[.\[]\S+)?: ")  # with which an error begins

Object = dict[str, Any]


@schemathesis.check
def refusals_have_a_reason(_context: CheckContext, response: Response, case: Case) -> None:
    """Fail for a 400 to what the schema allows, unless no schema could refuse it."""
    if response.status_code == 400 and is_valid(case):
        error = json.loads(response.content)["error"]
        assert REASONS.search(error["message"]), error["message"]


@schemathesis.check
def refusals_name_own_fields(_context: CheckContext, response: Response, case: Case) -> None:
    """Fail for a 400 that begins with a field which neither the API nor the body has."""
    if response.status_code != 400:
        return
    message = json.loads(response.content)["error"]["message"]
    named = FIELD.match(message)
    if named is not None:
        body = case.body if isinstance(case.body, dict) else {}
        assert named[1] in fields_of(case) | body.keys(), message


def fields_of(case: Case) -> set[str]:
    """Return the fields of the body that an operation takes."""
    bodies = case.operation.definition.raw["requestBody"]["content"]
    *_, name = bodies["application/json"]["schema"]["$ref"].split("/")
    return set(case.operation.schema.raw_schema["components"]["schemas"][name]["properties"])


def is_valid(case: Case) -> bool:
    """Whether a case is one that the schema allows."""
    return case.meta is not None and case.meta.generation.mode.is_positive


def encoded(text: str) -> str:
    """Return a text in base64."""
    return base64.b64encode(text.encode()).decode()


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
schemathesis.openapi.format("base64-text", TEXTS.map(encoded))
schemathesis.openapi.format(
    "text-data-url", TEXTS.map(lambda text: f"data:text/plain;base64,{encoded(text)}")
)


@schemathesis.hook
def before_call(_context: HookContext, case: Case, **_: Any) -> None:
    """Make a valid body keep to what its schema cannot state.

    A field that the schema does not declare is anything, so rules do not see it.
    """
    if is_valid(case) and isinstance(case.body, dict):
        fields = fields_of(case)
        extra = {name: value for name, value in case.body.items() if name not in fields}
        declared = {name: value for name, value in case.body.items() if name in fields}
        for rule in RULES:
            rule(declared)
        case.body = declared | extra


def name_tools_apart(body: Object) -> None:
    """Give no two tools one name."""
    for field in ("tools", "functions"):
        for index, tool in enumerate(body.get(field) or ()):
            named = next((tool[k] for k in ("function", "custom") if k in tool), tool)
            named["name"] = f"{named['name'][: MAX_NAME - 4]}_{index}"


def keep_to_max_tokens(body: Object) -> None:
    """Ask for no more tokens at least than at most."""
    params = body.get("sampling_params") or []
    for one in (body, *(params if isinstance(params, list) else [params])):
        most = [one[name] for name in MAX_TOKENS if one.get(name) is not None]
        for name in MIN_TOKENS:
            if one.get(name):
                one[name] = min(one[name], DEFAULT_TOKENS, *most)


def ask_for_few(body: Object) -> None:
    """Ask for as many sequences as one request may have, and for no fewer than are told."""
    prompt = body.get("prompt")
    num_prompts = len(prompt) if isinstance(prompt, list) else 1
    for field in ("n", "best_of"):
        if body.get(field):
            body[field] = min(body[field], max(1, MAX_SEQUENCES // num_prompts))
    if body.get("stream"):
        body.pop("best_of", None)
    if body.get("best_of"):
        body["best_of"] = max(body["best_of"], body.get("n") or 1)


def give_one_for_each(body: Object) -> None:
    """Have lists of `/generate` as long as that of its prompts, each continued once."""
    if body.get("stream"):  # no likelihoods of prompts are streamed
        body.pop("logprob_start_len", None)
    prompts = body.get("text") or body.get("input_ids")
    if not isinstance(prompts, list):
        return
    for field in BY_PROMPT:
        given = body.get(field)
        if isinstance(given, list):
            body[field] = [given[i % len(given)] for i in range(len(prompts))] if given else None
    params = body.get("sampling_params")
    for one in params if isinstance(params, list) else [params or {}]:
        one.pop("n", None)


RULES: tuple[Callable[[Object], None], ...] = (
    name_tools_apart,
    keep_to_max_tokens,
    ask_for_few,
    give_one_for_each,
)
