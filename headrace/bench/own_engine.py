"""The engine and prompts shared by `headrace bench latency` and `throughput`.

Flags that are not the benchmark's are the engine's, as `launch_server` has them.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.bench.serve import check_folder
from headrace.config.flags import Parser, parse_one
from headrace.config.model_card import read_card
from headrace.errors import ConfigError, HeadraceError, end_command
from headrace.offline.engine import Engine, embedded_config
from headrace.offline.sampling_params import SamplingParams

MAX_ID = 10_000  # random prompts have ids below it, as vLLM's
Bench = Callable[[argparse.Namespace, dict[str, Any]], None]


def parser_of(name: str, doc: str | None) -> Parser:
    """Return the parser of a benchmark, with the flags that both have."""
    parser = Parser(
        prog=f"headrace bench {name}",
        usage="%(prog)s [MODEL] [flags], and those of launch_server",
        description=doc,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--n", type=int, default=1, help="answers to each prompt")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the result")
    parser.add_argument("--disable-tqdm", action="store_true", help="show no progress")
    return parser


def run_command(parser: argparse.ArgumentParser, bench: Bench, argv: Sequence[str]) -> None:
    """Run a benchmark; end with one line where a flag or the model cannot work."""
    try:
        args, rest = parser.parse_known_args(argv)
        for name, value in vars(args).items():
            least = 0 if name == "num_iters_warmup" else 1
            if type(value) is int and value < least:
                raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least {least}")
        if args.output_json is not None:
            check_folder("--output-json", args.output_json.parent)
        bench(args, parse_one(rest))
    except HeadraceError as error:
        end_command(parser.prog, error)


@contextlib.contextmanager
def own_engine(fields: dict[str, Any]) -> Iterator[tuple[Engine, int]]:
    """Run an engine with some flags; yield it and its vocabulary size."""
    model, flags = fields.get("model"), {k: v for k, v in fields.items() if k != "model"}
    card = read_card(embedded_config(model, flags))
    print(f"starting an engine for {card.name} …", file=sys.stderr)
    with Engine(model, **flags) as engine:
        yield engine, card.vocab_size


def random_ids(
    lengths: Sequence[int], vocab_size: int, random: np.random.Generator
) -> list[list[int]]:
    """Return a prompt of each length."""
    highest = min(MAX_ID, vocab_size)
    return [random.integers(0, highest, length).tolist() for length in lengths]


def full_length(num_tokens: int, n: int) -> SamplingParams:
    """Return the parameters of answers that have exactly so many tokens, drawn as vLLM does."""
    return SamplingParams(n=n, max_tokens=num_tokens, temperature=1.0, top_p=1.0, ignore_eos=True)


def save(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write the result to `--output-json`."""
    if args.output_json is not None:
        args.output_json.write_text(json.dumps(result, indent=4) + "\n")
