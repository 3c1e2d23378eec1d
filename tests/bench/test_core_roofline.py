"""What the roof of a batch is reckoned from: bytes, experts and the peak of arithmetic."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import core_roofline
from core_roofline import Load
from cpu_step import PAGE_TOKENS, decode_batch
from headrace.engine_proc.worker.checkpoints.weights import Format
from headrace.engine_proc.worker.execution.held_matrices import WeightDtype
from headrace.engine_proc.worker.models.lowering import lower_config
from headrace.engine_proc.worker.models.model import open_model
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from support import arithmetic, random_gguf
from support.experts import ExpertCounter
from support.random_gguf import DenseShape
from support.random_weights import random_weights
from support.shapes import full_config

HIDDEN, WIDTH, EXPERTS, CHOSEN, LAYERS = 64, 32, 16, 2, 2


def small_mixture() -> DecoderSpec:
    """Return a mixture that takes no time."""
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "num_experts": EXPERTS}
    sizes |= {"num_experts_per_tok": CHOSEN, "num_hidden_layers": LAYERS, "vocab_size": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    return lower_config(full_config("qwen3-30b-a3b") | sizes | heads)


def test_experts_of_a_step_are_those_that_some_token_chooses() -> None:
    """One token chooses as many as it may, many tokens more, but not each its own."""
    spec = small_mixture()
    weights = random_weights(Format.BF16, spec)
    counter = ExpertCounter(spec, weights, num_pages=64, page_tokens=PAGE_TOKENS)
    one, same, many = counter.chosen([decode_batch(1, 0), decode_batch(1, 0), decode_batch(64, 0)])
    assert one == same == [CHOSEN] * LAYERS
    assert all(CHOSEN < count <= EXPERTS for count in many)


def test_a_mixture_reads_the_experts_that_were_counted() -> None:
    """Every further expert of a layer is three matrices, in int8 with a scale for each 32."""
    spec = small_mixture()
    load = Load(spec, random_weights(Format.BF16, spec), WeightDtype.INT8)
    load.experts = {(1, 0): [CHOSEN] * LAYERS, (8, 0): [CHOSEN + 1, CHOSEN + 4]}
    more = load.read_bytes(8, 0) - load.read_bytes(1, 0)
    assert more == 5 * 3 * HIDDEN * WIDTH * (1 + 1 / 32 * 2)


def test_products_of_a_token_are_those_of_its_experts() -> None:
    spec = small_mixture()
    load = Load(spec, random_weights(Format.BF16, spec), WeightDtype.PACKED)
    of_attention = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * 32
    of_mixture = EXPERTS * HIDDEN + CHOSEN * 3 * HIDDEN * WIDTH
    assert load.products == LAYERS * (of_attention + of_mixture)
    assert load.head_products == 128 * HIDDEN


def test_a_dense_shape_becomes_a_file_that_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = DenseShape("qwen2", 64, 128, 2, 1, 3, vocab=256, tied_head=False, rope_base=1e6)
    monkeypatch.setattr(random_gguf, "CACHE", tmp_path)
    monkeypatch.setitem(random_gguf.DENSE, "small", small)
    model = open_model(random_gguf.random_file("small-Q8_0"))
    assert len(model.spec.layers) == 3
    assert not model.spec.tied_head
    assert model.weights["head"].shape == (256, 64)
    assert not np.any(model.weights["layers.2.q.bias"].to_float32())


def test_shapes_have_the_sizes_of_their_configs() -> None:
    """`--shape` means the same model to benchmarks of files and of folders."""
    for name, shape in random_gguf.DENSE.items():
        config = full_config(name)
        assert shape.architecture == config["model_type"]
        assert (shape.hidden, shape.mlp) == (config["hidden_size"], config["intermediate_size"])
        assert (shape.layers, shape.vocab) == (config["num_hidden_layers"], config["vocab_size"])
        heads = (config["num_attention_heads"], config["num_key_value_heads"])
        assert (shape.heads, shape.kv_heads) == heads
        assert (shape.tied_head, shape.rope_base) == (
            config["tie_word_embeddings"],
            config["rope_theta"],
        )


def test_formats_whose_blocks_do_not_fit_are_left_out() -> None:
    """Rows of gpt-oss have 2,880 numbers."""
    spec = core_roofline.spec_of("gpt-oss-20b")
    fitting = [format for format in core_roofline.FORMATS if core_roofline.suits(format, spec)]
    assert fitting == ["BF16", "Q4_0", "Q8_0", "MXFP4", "INT8"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_every_kernel_here_has_a_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Portable kernels and those of arm64 have none."""
    monkeypatch.setattr(arithmetic, "TRIAL_S", 0.001)
    monkeypatch.setattr("support.compiled.CACHE", tmp_path)
    for factors in ("bf16", "int16", "int8"):
        peak = arithmetic.arithmetic_of("best", factors, threads=1)
        assert peak is None or peak.products_per_s() > 0
    assert arithmetic.Arithmetic(1).products_per_s() > 0
