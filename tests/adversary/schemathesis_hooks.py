"""What schemathesis checks beside its own: that a 400 to what the schema allows has a reason."""

import json
import re

import schemathesis
from schemathesis import Case, CheckContext, Response

# What no schema can say: how two fields compare, what is in a text, and what is not in the request.
REASONS = re.compile(
    r"maximum context length is|context of \d+"
    r"|min_tokens: must be at most max_tokens"
    r"|best_of: must be at least n|best_of: what is best is not known"
    r"|is more than \d+ sequences in one request"
    r"|suffix: this model's vocabulary"
    r"|log probabilities .* are more than"
    r"|must be one, or a list with one for each prompt|must have the same 'n' for all"
    r"|there must be either|must be a list of token ids, or"
    # Of a conversation: what its parts are depends on their types, and its template decides.
    r"|the chat template|is there already|continue_final_message|not together with"
    r"|must be a string or a list of text parts|this model takes text, not|a text part needs"
    r"|must have a 'function', or a 'custom' one|a message needs|a call needs|a grammar needs"
    r"|a tool_use block needs|items are not supported|top_logprobs: only allowed with"
    r"|data: URL|base64|files are read as text|is not UTF-8|media_type|citations|no files are kept"
    # 1.0 is an integer to JSON Schema, and none to msgspec.
    r"|Expected `int.*`, got `float`|prompt: must be a string, a list of strings"
)


@schemathesis.check
def refusals_have_a_reason(_context: CheckContext, response: Response, case: Case) -> None:
    """Fail for a 400 to what the schema allows, unless no schema could refuse it."""
    if response.status_code != 400 or case.meta is None:
        return
    if case.meta.generation.mode.is_positive:
        error = json.loads(response.content)["error"]
        assert REASONS.search(error["message"]), error["message"]
