"""An encoder in the C++ core without a server, beside what fp32 allows."""

import math
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from headrace.engine_proc.worker.execution.cpu_encoder import CpuEncoder, most_pages
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor, KVDtype
from headrace.engine_proc.worker.execution.executor import Batch
from headrace.engine_proc.worker.models.model import DecoderModel, open_model
from headrace.system.machine import usable_cores

PAGE_TOKENS = 32
STEP_TOKENS = 512  # as of `--max-num-batched-tokens`
FLOPS = 2  # of a number of a weight: a multiplication and an addition
PER_LAYER = "layers."


class EncoderCore:
    """Embeds texts in fp32, in steps such as an engine makes.

    Attributes:
        num_texts: in all.
        flops: of products with weights and of attention, for all texts.
        product_flops: of products with weights alone.
    """

    def __init__(self, folder: Path, texts: list[str]) -> None:
        model = open_model(folder)
        assert model.pooling is not None
        ids = token_ids(folder, texts, model.pooling.max_tokens)
        self.num_texts = len(ids)
        self.product_flops = sum(map(len, ids)) * product_flops(model)
        self.flops = self.product_flops + sum(attention_flops(model, len(one)) for one in ids)
        self._steps = [batch(step) for step in steps(ids)]
        self._executor = CpuExecutor(
            model.spec,
            model.weights,
            num_pages=most_pages(STEP_TOKENS, STEP_TOKENS, PAGE_TOKENS),
            page_tokens=PAGE_TOKENS,
            kv_dtype=KVDtype.FLOAT32,
            rounds_activations=False,
            threads=usable_cores(),
        )
        self._encoder = CpuEncoder(self._executor, model.pooling.kind)
        self._executor.step_seconds()

    def seconds(self) -> float:
        """Embed all texts; return how long it took."""
        start = time.perf_counter()
        for step in self._steps:
            self._encoder.embed(step)
        return time.perf_counter() - start

    def parts(self) -> dict[str, float]:
        """Embed all texts; return the seconds of each part, as the calling thread sees them."""
        self._executor.step_seconds()
        seconds = self.seconds()
        parts = self._executor.step_seconds()
        return parts | {"outside the core": seconds - sum(parts.values())}


def token_ids(folder: Path, texts: list[str], max_tokens: int | None) -> list[list[int]]:
    """Return the ids of each text, cut where the model's end."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    if max_tokens is not None:
        tokenizer.enable_truncation(max_tokens)
    return [encoding.ids for encoding in tokenizer.encode_batch(texts)]


def steps(ids: list[list[int]]) -> list[list[list[int]]]:
    """Return the texts of each step: in order, while there is room for the next."""
    found: list[list[list[int]]] = [[]]
    for text in ids:
        if sum(map(len, found[-1])) + len(text) > STEP_TOKENS:
            found.append([])
        found[-1].append(text)
    return found


def batch(texts: list[list[int]]) -> Batch:
    """Return a step of whole texts."""
    lengths = [len(text) for text in texts]
    return Batch(
        token_ids=np.concatenate(texts).astype(np.int32),
        positions=np.concatenate([np.arange(length) for length in lengths]).astype(np.int32),
        sequences=np.repeat(np.arange(len(texts), dtype=np.int32), lengths),
        page_table=np.zeros((len(texts), 1), np.int32),
        logit_rows=np.cumsum(lengths, dtype=np.int32) - 1,
    )


def product_flops(model: DecoderModel) -> int:
    """Return what products with weights take for a token."""
    shapes = [own.shape for name, own in model.weights.items() if name.startswith(PER_LAYER)]
    return FLOPS * sum(math.prod(shape) for shape in shapes if len(shape) == 2)


def attention_flops(model: DecoderModel, num_tokens: int) -> int:
    """Return what scores and sums of values take for a text whose tokens all see each other."""
    spec = model.spec
    of_layer = 2 * FLOPS * num_tokens**2 * spec.num_heads * spec.head_dim
    return len(spec.layers) * of_layer
