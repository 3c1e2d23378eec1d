"""Measure the cost of a grammar per step.

Method: the whole ring, embedded, with the demo model. B sequences generate the same number of
        tokens each, either freely or under a JSON Schema that has them go on; both are sampled.
        "step" is the time of all, by tokens of a sequence. Masks are made while the worker
        computes, so it shows only their visible part and their application. "mask" is the time of
        one mask in the engine, by the text of such a sequence, token by token. "longest gap" is the
        longest time between two pieces of a running stream while another request comes. That
        request has no grammar, the engine's first grammar, or a later one. Each round has an engine
        of its own.
Run:    python bench/grammar.py --rounds 5
"""

import json
import statistics
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from llguidance import LLMatcher
from tokenizers import Tokenizer

from headrace import Engine, SamplingParams
from headrace.config.model_card import read_gguf
from headrace.engine_proc.sequence.grammar_matcher import GrammarMatcher
from headrace.engine_proc.shm.grammar_bitmask import GrammarBitmask
from headrace.model.grammar_compiler import GrammarCompiler
from headrace.model.tokenizer_json import read_tokenizer_json
from support.models import demo_model
from support.report import Quantity, Report, parser

BATCHES = (1, 8, 32)
NUM_TOKENS = 64
PROMPT = "People and what they do, as JSON: "
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "roles": {"type": "array", "items": {"enum": ["admin", "author", "reader"]}},
    },
    "required": ["name", "age", "email", "roles"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 1000}
SYSTEMS = {"free": {}, "JSON Schema": {"structured_outputs": {"json": SCHEMA}}}
BESIDE = {
    "no grammar": {},
    "the first grammar": SYSTEMS["JSON Schema"],
    "another grammar": {"structured_outputs": {"regex": "[a-z]{99}"}},
}


def generate(engine: Engine, batch: int, options: dict[str, object]) -> tuple[float, str]:
    """Return the milliseconds of a step of `batch` sequences, and the first text."""
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed) for seed in range(batch)
    ]
    started_at = time.perf_counter()
    outputs = engine.generate([PROMPT] * batch, params, use_tqdm=False, **options)
    ms = (time.perf_counter() - started_at) * 1e3 / NUM_TOKENS
    assert sum(output.usage.completion_tokens for output in outputs) == batch * NUM_TOKENS
    return ms, outputs[0].text


def mask_us(compiler: GrammarCompiler, area: GrammarBitmask, ids: list[int]) -> float:
    """Return the mean microseconds of the masks of a text."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))
    matcher = GrammarMatcher(compiler.compile(grammar), frozenset())
    tokens, none = array("i", ids), array("i")
    times = []
    for end in range(len(tokens) + 1):
        started_at = time.perf_counter()
        matcher.fill(tokens[:end], none, area, 0)
        times.append((time.perf_counter() - started_at) * 1e6)
    assert not matcher.is_stuck
    return statistics.mean(times)


def longest_gap(engine: Engine, options: dict[str, object]) -> float:
    """Return the milliseconds of the longest gap in a stream, beside which a request comes."""
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=1)
    stream = engine.stream(PROMPT, params)
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(generate, engine, 1, options)
        at = [time.perf_counter() for _ in stream]
        beside.result()
    return max(after - before for before, after in pairwise(at)) * 1e3


def main() -> None:
    """Run."""
    args = parser(__doc__, rounds=5).parse_args()
    report = Report("grammar", args)
    steps = [
        Quantity(f"step, {batch} sequences", "ms", {system: [] for system in SYSTEMS})
        for batch in BATCHES
    ]
    masks = Quantity("mask", "us", {"JSON Schema": []})
    gaps = Quantity("longest gap", "ms", {system: [] for system in BESIDE})
    card = read_gguf(demo_model())
    compiler = GrammarCompiler(card.path, card.vocab_size, card.eos_token_ids)
    tokenizer = Tokenizer.from_buffer(read_tokenizer_json(demo_model()))
    area = GrammarBitmask.create(1, card.vocab_size)
    for _ in range(args.rounds):
        with Engine(demo_model(), max_model_len=1024) as engine:
            for system, options in BESIDE.items():
                gaps.samples[system].append(longest_gap(engine, options))
            for batch, quantity in zip(BATCHES, steps, strict=True):
                for system, options in SYSTEMS.items():
                    ms, text = generate(engine, batch, options)
                    quantity.samples[system].append(ms)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        masks.samples["JSON Schema"].append(mask_us(compiler, area, ids))
    for quantity in (*steps, masks, gaps):
        report.add(quantity)
    report.finish()


if __name__ == "__main__":
    main()
