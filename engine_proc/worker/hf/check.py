"""Opened, then checked: what our attention makes of a model is what transformers' own makes of it.

Two short texts are run in chunks, side by side, through the executor that will serve the model,
and each by itself through transformers. What a model carries from token to token beside keys and
values, or numbers by their place in the batch, shows as a difference.
"""

from collections.abc import Callable

import numpy as np
import torch

from headrace.engine_proc.worker.execution.executor import Batch, Floats, Int32s
from headrace.engine_proc.worker.hf.encoder_executor import EncoderExecutor
from headrace.engine_proc.worker.hf.executor import TransformersExecutor, to_floats
from headrace.engine_proc.worker.hf.hook import HOOKED
from headrace.engine_proc.worker.hf.model import TransformersModel
from headrace.engine_proc.worker.reference.torch_attention import to_tensor
from headrace.errors import ModelError
from headrace.model.pooling import PoolingKind

TEXT_TOKENS = (12, 7)
CHUNK = 5  # of the first text; its rest shares a batch with the second text
PAGE_TOKENS = 4
PAGES = np.array([[3, 0, 5], [1, 4, 2]], np.int32)
EXACT, ROUNDED = 1e-3, 0.1  # relative differences, in fp32 and in anything shorter


def check(
    model: TransformersModel,
    cut: Callable[[TransformersModel], TransformersModel] = lambda model: model,
) -> TransformersModel:
    """Compare a model, when `cut` has left what this worker has of it, with itself before.

    Raises:
        ModelError: they differ; the model cannot be served.
    """
    vocab = model.module.config.get_text_config().vocab_size
    texts = [np.arange(1, 1 + n, dtype=np.int32) * 7919 % vocab for n in TEXT_TOKENS]
    whole = alone(model, texts)
    model = cut(model)
    found = run_causal(model, texts) if model.is_causal else run_encoder(model, texts)
    limit = EXACT if model.module.dtype == torch.float32 else ROUNDED
    for ours, theirs in zip(found, whole, strict=True):
        # The median, as one token of a mixture may round its way to other experts.
        differences = np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
        if not np.median(differences) < limit:
            raise ModelError(
                f"{model.architecture} differs by {np.median(differences):.1%} from itself when "
                "run in chunks and batches, so it cannot be served; it needs more of its "
                "attention than queries, keys and values"
            )
    return model


def alone(model: TransformersModel, texts: list[Int32s]) -> list[Floats]:
    """Return transformers' output for each text: the first in the same chunks as here."""
    module = model.module
    module.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            whole = [
                to_floats(module(to_tensor(text, module.device)[None])[0][0]) for text in texts
            ]
    finally:
        module.set_attn_implementation(HOOKED)
    first, second = whole
    return [first[:CHUNK], first[CHUNK:], second] if model.is_causal else [first, second]


def run_causal(model: TransformersModel, texts: list[Int32s]) -> list[Floats]:
    """Return the paged executor's output for the first text's two parts, and for the second."""
    executor = TransformersExecutor(model, num_pages=6, page_tokens=PAGE_TOKENS)
    first, second = texts
    run = executor.forward if model.pooling is None else executor.embed
    beginning = run(flatten([first[:CHUNK]], [0]))
    both = run(flatten([first[CHUNK:], second], [CHUNK, 0]))
    rest = len(first) - CHUNK
    return [beginning, both[:rest], both[rest:]]


def run_encoder(model: TransformersModel, texts: list[Int32s]) -> list[Floats]:
    """Return the encoder executor's output for both, in one batch."""
    executor = EncoderExecutor(model, PoolingKind.MEAN)
    hidden = to_floats(executor.hidden_states(flatten(texts, [0, 0])))
    return np.split(hidden, [len(texts[0])])


def flatten(parts: list[Int32s], starts: list[int]) -> Batch:
    """Make a batch of parts of sequences, with the output of every token."""
    counts = [len(part) for part in parts]
    positions = [np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
    return Batch(
        token_ids=np.concatenate(parts),
        positions=np.concatenate(positions).astype(np.int32),
        sequences=np.repeat(np.arange(len(parts), dtype=np.int32), counts),
        page_table=PAGES[: len(parts)],
        logit_rows=np.arange(sum(counts), dtype=np.int32),
    )
