"""The limit of log probabilities per request. Pure.

An entry is one log probability: a token has one of its own and `num_top` of the likeliest. They are
kept until they are rendered (8 bytes each), rendered in 2 to 4 us and sent as some 80 bytes.
"""

from collections.abc import Iterable

from headrace.errors import InvalidValue
from headrace.ipc.messages import Api, GenerateRequest, ResponsePlan
from headrace.tokenizer_proc.jobs.stages import Ids

MAX_ENTRIES = 1 << 22  # 32 MB, and an answer of some 300 MB
MAX_REPEATED_ENTRIES = 1 << 16  # where one event of a stream may tell all of them


def entries_of(num_tokens: int, num_top: int | None) -> int:
    """Return the entries of tokens; `num_top` is None where none are wanted."""
    return 0 if num_top is None else num_tokens * (1 + num_top)


def num_entries(requests: Iterable[GenerateRequest], prompts: Iterable[Ids]) -> int:
    """Return the entries of sequences and their prompts."""
    return sum(
        entries_of(len(prompt), request.sampling.prompt_logprobs)
        + entries_of(request.max_tokens, request.sampling.logprobs)
        for request, prompt in zip(requests, prompts, strict=True)
    )


def limit_of(plan: ResponsePlan) -> int:
    """Return how many entries there may be in a response.

    Of what streams, `/generate` repeats all so far in each event, `/v1/responses` at its end, and
    `/v1/completions` sends an echoed prompt at once.
    """
    repeats = plan.api in (Api.RESPONSES, Api.GENERATE) or plan.echo
    is_repeated = plan.stream and repeats and plan.logprobs is not None
    return MAX_REPEATED_ENTRIES if is_repeated else MAX_ENTRIES


def room_of(plan: ResponsePlan, num_of_prompts: int, num_sequences: int) -> int | None:
    """Return a sequence's token limit if its request has none; None is unlimited.

    Args:
        num_of_prompts: entries of all prompts.
    """
    each = entries_of(1, plan.logprobs) * num_sequences
    return max(1, (limit_of(plan) - num_of_prompts) // each) if each else None


def check_logprobs(plan: ResponsePlan, num_of_prompts: int, max_tokens: Iterable[int]) -> None:
    """Refuse a response with too many log probabilities.

    Args:
        num_of_prompts: entries of all prompts.
        max_tokens: of each sequence.

    Raises:
        InvalidValue: the text has the number, and the limit.
    """
    num_of_responses = entries_of(sum(max_tokens), plan.logprobs)
    limit, total = limit_of(plan), num_of_prompts + num_of_responses
    if total <= limit:
        return
    param = "logprobs" if num_of_responses >= num_of_prompts or plan.echo else "prompt_logprobs"
    streams = " in a stream of this kind" if limit < MAX_ENTRIES else ""
    raise InvalidValue(
        f"{param}: {total} log probabilities (sequences x tokens x likeliest tokens and their own) "
        f"are more than {limit} in one request{streams}; ask for fewer prompts, tokens or "
        "likeliest tokens",
        param,
    )
