"""`headrace bench serve`: latency and throughput of a server under a given load.

Flags and figures are those of `vllm bench serve` where it has them.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from headrace import extras
from headrace.bench.arrivals import Seconds, arrival_times
from headrace.bench.draft_counts import DraftCounts
from headrace.bench.endpoint import PATHS, Endpoint
from headrace.bench.figures import TITLES, Settings, compute, table
from headrace.bench.load import LoadProgress, LoadRequest, LoadResult, run_load
from headrace.bench.pages import MIN_DPI, Pages
from headrace.bench.plot import check_plot, write_plot
from headrace.bench.random_images import BUCKETS, LIMITS, RandomImages
from headrace.bench.workload import (
    BenchPrompt,
    TokenRates,
    body_of,
    prefix_prompts,
    random_prompts,
    sharegpt_prompts,
)
from headrace.config.flags import Parser
from headrace.errors import ConfigError, HeadraceError, end_command

BACKENDS = {
    "openai": "completions",
    "openai-chat": "chat",
    "openai-embeddings": "embeddings",
    "vllm": "completions",  # as the first, by the name that vLLM's tool has for it
}
DATASETS = ("random", "random-mm", "sharegpt", "prefix_repetition")
SAMPLE_BYTES = 4000


def json_object(text: str) -> dict[str, Any]:
    """Read fields of a request."""
    fields = json.loads(text)  # JSONDecodeError is a ValueError
    if not isinstance(fields, dict):
        raise ValueError
    return fields


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the target and of the load on it."""
    add = parser.add_argument
    add("--backend", choices=BACKENDS, default="openai-chat", help="the API")
    add("--base-url", help="http(s)://host:port; instead of --host and --port")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--endpoint", help="path of the requests; default: the backend's")
    add("--header", action="append", default=[], metavar="NAME=VALUE", help="may be repeated")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY")
    add("--model", help="default: the first of /v1/models")
    add("--num-prompts", type=int, default=1000)
    add("--request-rate", type=float, default=float("inf"), help="requests a second; inf: at once")
    add("--burstiness", type=float, default=1.0, help="1: Poisson arrivals; less: in bursts")
    add("--max-concurrency", type=int, help="requests that are open at once, at most")
    add("--num-warmups", type=int, default=1, help="warm-up requests, not measured")
    add("--client-procs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    add("--seed", type=int, default=0, help="of prompts, lengths and arrivals")
    add("--ignore-eos", action="store_true", help="generate all tokens that are asked for")
    add(
        "--extra-body", type=json_object, default={}, metavar="JSON", help="more fields of requests"
    )
    add("--disable-tqdm", action="store_true", help="show no progress")
    add("--save-result", action="store_true", help="write a JSON file")
    add("--result-dir", type=Path, default=Path())
    add("--result-filename", help="default: a name made of the settings and the time")


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the workload. Lengths are in tokens."""
    add = parser.add_argument
    add("--dataset-name", choices=DATASETS, default="random")
    add("--dataset-path", type=Path, help="the ShareGPT file")
    add("--random-input-len", "--input-len", type=int, default=1024)
    add("--random-output-len", "--output-len", type=int, default=128)
    add("--random-range-ratio", type=float, default=0.0, help="lengths vary by this share of them")
    add("--random-prefix-len", type=int, default=0, help="common to all prompts, before the input")
    add("--sharegpt-output-len", type=int, help="instead of the lengths in the file")
    add("--prefix-repetition-num-prefixes", type=int, default=10)
    add("--prefix-repetition-prefix-len", type=int, default=256)
    add("--prefix-repetition-suffix-len", type=int, default=256)
    add("--prefix-repetition-output-len", type=int, default=128)
    add("--random-mm-base-items-per-request", type=int, default=1, help="images of a prompt")
    add("--random-mm-num-mm-items-range-ratio", type=float, default=0.0, help="of that number")
    add("--random-mm-limit-mm-per-prompt", default=LIMITS, metavar="JSON")
    add("--random-mm-bucket-config", default=BUCKETS, help="(height, width, 1): share of images")
    add("--images", type=int, default=0, help="scanned pages in each prompt, no two of them alike")
    add("--image-dpi", type=int, default=200, help="of an A4 page: 1.2 MB at 200, 2.5 MB at 300")


def add_result(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the output."""
    add = parser.add_argument
    add("--percentile-metrics", help="of ttft, tpot, itl, e2el; default: the first three")
    add("--metric-percentiles", default="99", help="such as 50,90,99")
    add(
        "--goodput",
        nargs="*",
        default=[],
        metavar="METRIC:MS",
        help="latency goals, such as ttft:200 tpot:50",
    )
    add("--save-detailed", action="store_true", help="include the figures of every request")
    add("--plot", type=Path, metavar="FILE.svg|.png|.html", help="draw the figures")


def parse_promises(words: Sequence[str]) -> dict[str, float]:
    """Read `ttft:200 tpot:50`."""
    promises = {}
    for word in words:
        metric, _, limit = word.partition(":")
        try:
            promises[metric] = float(limit)
        except ValueError:
            raise ConfigError(f"--goodput {word} is not METRIC:MILLISECONDS") from None
        if not promises[metric] > 0:
            raise ConfigError(f"--goodput {word}: the limit must be more than 0")
        if metric not in ("ttft", "tpot", "e2el"):
            raise ConfigError(f"--goodput {word}: the metric must be one of ttft, tpot, e2el")
    return promises


def check(args: argparse.Namespace) -> None:
    """Refuse numbers that cannot work."""
    for name, value in vars(args).items():
        is_count = name.endswith(("_len", "_prefixes")) and name != "random_prefix_len"
        named = ("num_prompts", "request_rate", "burstiness", "client_procs", "max_concurrency")
        if value is not None and (is_count or name in named) and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be more than 0")
        if name in ("num_warmups", "random_prefix_len") and value < 0:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 0")
    if args.images < 0 or args.image_dpi < MIN_DPI:
        raise ConfigError(
            f"--images {args.images} must be at least 0, and "
            f"--image-dpi {args.image_dpi} at least {MIN_DPI}"
        )
    has_images = args.images or args.dataset_name == "random-mm"
    if has_images and BACKENDS[args.backend] != "chat":
        raise ConfigError("--images and --dataset-name random-mm need --backend openai-chat")
    if has_images:
        extras.require("images", "--images or --dataset-name random-mm")
    if not 0 <= args.random_range_ratio < 1:
        raise ConfigError(f"--random-range-ratio {args.random_range_ratio} must be from 0 to 1")
    if args.save_result or getattr(args, "save_detailed", False):
        file = args.result_dir / (args.result_filename or "named later")
        check_folder("--result-dir", file.parent)


def check_folder(flag: str, folder: Path) -> None:
    """Make a folder where there is none, or refuse it now, not when all has been measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag}: {folder} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{flag}: {folder} cannot be written to")


def settings_of(args: argparse.Namespace) -> Settings:
    """Return what the result is to have.

    Raises:
        ConfigError: a flag has a value that cannot work.
    """
    metrics = (args.percentile_metrics or "ttft,tpot,itl").split(",")
    if BACKENDS[args.backend] == "embeddings":
        metrics = ["e2el"]
    for metric in metrics:
        if metric not in TITLES:
            raise ConfigError(f"--percentile-metrics {metric}: must be of {', '.join(TITLES)}")
    try:
        percentiles = [float(p) for p in args.metric_percentiles.split(",")]
    except ValueError:
        raise ConfigError(f"--metric-percentiles {args.metric_percentiles}: not numbers") from None
    if not all(0 <= p <= 100 for p in percentiles):
        raise ConfigError(f"--metric-percentiles {args.metric_percentiles}: not from 0 to 100")
    if args.plot is not None:
        check_plot(args.plot)
        check_folder("--plot", args.plot.parent)
    return Settings(
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        max_concurrency=args.max_concurrency,
        metrics=metrics,
        percentiles=percentiles,
        promises=parse_promises(args.goodput),
    )


def endpoint_of(args: argparse.Namespace) -> Endpoint:
    """Return where the load goes."""
    for header in args.header:
        if "=" not in header:
            raise ConfigError(f"--header {header} is not NAME=VALUE")
    headers = dict(header.split("=", 1) for header in args.header)
    if args.api_key:
        headers.setdefault("Authorization", f"Bearer {args.api_key}")
    kind = BACKENDS[args.backend]
    base_url = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/")
    if not base_url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url {base_url} must begin with http:// or https://")
    path = args.endpoint or PATHS[kind]
    if not path.startswith("/"):
        raise ConfigError(f"--endpoint {path} must begin with /")
    return Endpoint(base_url, kind, path, headers)


def prompts_of(args: argparse.Namespace, rates: TokenRates) -> list[BenchPrompt]:
    """Make or read the prompts."""
    random = np.random.default_rng(args.seed)
    if args.dataset_name == "sharegpt":
        return sharegpt_prompts(
            args.dataset_path,
            args.num_prompts,
            output_len=args.sharegpt_output_len,
            rates=rates,
            random=random,
        )
    if args.dataset_name == "prefix_repetition":
        return prefix_prompts(
            args.num_prompts,
            num_prefixes=args.prefix_repetition_num_prefixes,
            prefix_len=args.prefix_repetition_prefix_len,
            suffix_len=args.prefix_repetition_suffix_len,
            output_len=args.prefix_repetition_output_len,
            rates=rates,
            random=random,
        )
    return random_prompts(
        args.num_prompts,
        input_len=args.random_input_len,
        output_len=args.random_output_len,
        range_ratio=args.random_range_ratio,
        prefix_len=args.random_prefix_len,
        rates=rates,
        random=random,
    )


def with_images(args: argparse.Namespace, prompts: list[BenchPrompt]) -> list[BenchPrompt]:
    """Return prompts with the requested images."""
    if args.dataset_name == "random-mm":
        images = RandomImages.of(
            args.random_mm_bucket_config,
            args.random_mm_limit_mm_per_prompt,
            args.random_mm_base_items_per_request,
            args.random_mm_num_mm_items_range_ratio,
        )
        prompts = images.with_images(prompts, np.random.default_rng(args.seed))
    if not args.images:
        return prompts
    pages = Pages(args.image_dpi, np.random.default_rng(args.seed))
    return [
        replace(prompt, images=prompt.images + tuple(pages.url() for _ in range(args.images)))
        for prompt in prompts
    ]


def sample_of(args: argparse.Namespace) -> str:
    """Return a piece of the dataset, to be counted by the server; "" where words are made up."""
    if args.dataset_name != "sharegpt":
        return ""
    if args.dataset_path is None:
        raise ConfigError("--dataset-name sharegpt needs --dataset-path")
    firsts = sharegpt_prompts(
        args.dataset_path,
        100,
        output_len=args.sharegpt_output_len,
        rates=TokenRates(),
        random=np.random.default_rng(args.seed),
    )
    return "\n".join(prompt.text for prompt in firsts)[:SAMPLE_BYTES]


def requests_of(args: argparse.Namespace, endpoint: Endpoint, model: str) -> list[LoadRequest]:
    """Return all requests and when they are due."""
    options = {"ignore_eos": True} if args.ignore_eos else {}
    options |= args.extra_body
    prompts = with_images(args, prompts_of(args, endpoint.rates(model, sample_of(args))))
    if getattr(args, "pretok", False):
        prompts = [replace(p, ids=endpoint.tokenize(model, p.text)) for p in prompts]
    due = due_times(args, len(prompts))
    return [
        LoadRequest(i, float(due[i]), body_of(prompt, endpoint.kind, model, options))
        for i, prompt in enumerate(prompts)
    ]


def due_times(args: argparse.Namespace, num_requests: int) -> Seconds:
    """Return when each request is due, seconds after the start."""
    interval_ms = getattr(args, "submit_interval_ms", None)
    if interval_ms is not None:
        return np.arange(num_requests, dtype=np.float64) * np.float64(interval_ms / 1e3)
    # Not the prompts' generator: the same arrivals whatever is asked.
    random = np.random.default_rng([args.seed, 1])
    return arrival_times(num_requests, args.request_rate, args.burstiness, random)


class ProgressBar:
    """A progress bar of the load, on standard error."""

    def __init__(self, num_requests: int, disable: bool) -> None:
        self._bar = tqdm(total=num_requests, unit="req", disable=disable)
        self._began = time.monotonic()

    def show(self, progress: list[LoadProgress]) -> None:
        """Combine the results of the load processes."""
        done = sum(p.num_done for p in progress)
        rate = sum(p.num_tokens for p in progress) / max(time.monotonic() - self._began, 1e-9)
        self._bar.set_postfix(
            open=sum(p.num_open for p in progress),
            failed=sum(p.num_failed for p in progress),
            tok_s=f"{rate:,.0f}",
            refresh=False,
        )
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Leave the last line as it is."""
        self._bar.close()


def run(args: argparse.Namespace, endpoint: Endpoint, requests: list[LoadRequest]) -> LoadResult:
    """Warm up, then run the load."""
    warmups = [at_once(request) for request in requests[: args.num_warmups]]
    if warmups:
        asyncio.run(run_load(endpoint.target, warmups))
    bar = ProgressBar(len(requests), args.disable_tqdm)
    try:
        return asyncio.run(
            run_load(endpoint.target, requests, args.max_concurrency, args.client_procs, bar.show)
        )
    finally:
        bar.close()


def at_once(request: LoadRequest) -> LoadRequest:
    """Return a request that is due at once."""
    return LoadRequest(request.index, 0.0, request.body)


def details_of(outcome: LoadResult) -> dict[str, Any]:
    """Return the figures of every request, in the order of sending; seconds."""
    records = outcome.records
    return {
        "start_times": [record.sent - outcome.start for record in records],
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "ttfts": [record.first - record.sent if record.first else None for record in records],
        "itls": [np.frombuffer(record.gaps, np.float32).tolist() for record in records],
    }


def save(args: argparse.Namespace, result: dict[str, Any]) -> Path:
    """Write the JSON file and return where it is."""
    rate = f"{args.request_rate:g}qps"
    name = args.result_filename or f"{args.backend}-{rate}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path: Path = args.result_dir / name
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def bench(args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark of the flags; print the table; return the result."""
    check(args)
    settings = settings_of(args)
    endpoint = endpoint_of(args)
    model = args.model or endpoint.model()
    requests = requests_of(args, endpoint, model)
    drafts_before = DraftCounts.read(endpoint.metrics())
    outcome = run(args, endpoint, requests)
    drafts = DraftCounts.read(endpoint.metrics()).since(drafts_before)
    result = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "model_id": model,
        "num_prompts": args.num_prompts,
        **compute(outcome, settings),
        **drafts.as_result(),
    }
    if args.plot is not None:
        write_plot(args.plot, outcome, result)
    lines = [table(result, settings)]
    if args.save_result or args.save_detailed:
        saved = result | (details_of(outcome) if args.save_detailed else {})
        lines.append(f"saved {save(args, saved)}")
    print(*lines, sep="\n")
    return result


def run_command(
    name: str,
    doc: str | None,
    flags: Sequence[Callable[[argparse.ArgumentParser], None]],
    bench: Callable[[argparse.Namespace], dict[str, Any]],
    argv: Sequence[str],
) -> None:
    """Run `headrace bench NAME`; exit with 1 where nothing succeeded, 2 if a flag cannot work."""
    prog = f"headrace bench {name}"
    parser = Parser(
        prog=prog, description=doc, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for add in flags:
        add(parser)
    try:
        result = bench(parser.parse_args(argv))
    except HeadraceError as error:
        end_command(prog, error)
    if not result["completed"]:
        sys.exit(1)


def main(argv: Sequence[str]) -> None:
    """Run."""
    run_command("serve", __doc__, [add_target, add_workload, add_result], bench, argv)
