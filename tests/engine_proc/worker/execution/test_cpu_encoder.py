"""Encoders in the C++ core: vectors and scores are transformers', and batch mates change no bit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from embedding_models import TEXTS, add_modules, minilm
from engine_configs import execution_config
from safetensors.torch import load_file, save_file

from headrace.engine_proc.worker.execution.cpu_encoder import CpuEncoder, most_pages
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor, Isa, UnsupportedSpec
from headrace.engine_proc.worker.execution.embedder import Embedder
from headrace.engine_proc.worker.execution.executor import Batch, Floats
from headrace.engine_proc.worker.model_opener import open_for
from headrace.engine_proc.worker.models.model import DecoderModel, NotLowered, open_model
from headrace.errors import ModelError
from headrace.tokenizer_proc.encoding.encoder import Encoder
from headrace.tokenizer_proc.jobs.stages import Text

TINY: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.3,
    "pad_token_id": 1,
}
MODERN = {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("bert", {}),
    ("roberta", {"max_position_embeddings": 514}),
    ("xlm-roberta", {"type_vocab_size": 1, "max_position_embeddings": 514}),
    ("camembert", {"max_position_embeddings": 514}),
    ("electra", {"embedding_size": 32}),
    ("distilbert", {"dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 2}),
    ("modernbert", MODERN | {"local_attention": 8}),
    ("modernbert", MODERN | {"local_attention": 100, "norm_bias": True, "attention_bias": True}),
]
GEMMA = {
    "head_dim": 16,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 16,
    "sliding_window": 40,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "use_bidirectional_attention": True,
    "initializer_range": 0.1,
}
LEAST_COSINE = 0.9999  # of what is rounded to 16 bits
LENGTHS = [1, 5, 300, 33, 17]  # of one page and of several, of one segment and of two
RANDOM = np.random.default_rng(0)
IDS = [RANDOM.integers(4, 100, length).tolist() for length in LENGTHS]


def flatten(texts: Sequence[Any], seconds: Sequence[int] | None = None) -> Batch:
    counts = [len(text) for text in texts]
    types = [np.arange(n) >= s for n, s in zip(counts, seconds or counts, strict=True)]
    return Batch(
        token_ids=np.concatenate(texts).astype(np.int32),
        positions=np.concatenate([np.arange(n) for n in counts]).astype(np.int32),
        sequences=np.repeat(np.arange(len(texts), dtype=np.int32), counts),
        page_table=np.zeros((len(texts), 1), np.int32),
        logit_rows=np.cumsum(counts, dtype=np.int32) - 1,
        token_types=None if seconds is None else np.concatenate(types).astype(np.int32),
    )


def save(folder: Path, kind: str, auto_class: Any, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **TINY | fields)
    model = auto_class.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def opened(folder: Path, **options: Any) -> Embedder:
    model = open_for(execution_config(folder))
    assert isinstance(model, DecoderModel)
    assert model.pooling is not None
    executor = CpuExecutor(
        model.spec, model.weights, num_pages=most_pages(400, 8, 32), page_tokens=32, **options
    )
    return Embedder(
        CpuEncoder(executor, model.pooling.kind),
        normalize=model.pooling.normalize,
        dense=model.dense,
    )


def least_cosine(embedder: Embedder, expected: Floats, texts: list[list[int]] = IDS) -> float:
    found = embedder.embed(flatten(texts))
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return float(((found * expected).sum(axis=1) / lengths).min())


def hidden_of(model: Any, text: Sequence[int]) -> Floats:
    with torch.inference_mode():
        hidden: Floats = model(torch.tensor([text])).last_hidden_state[0].numpy()
    return hidden


@pytest.mark.parametrize(("kind", "fields"), FAMILIES)
def test_a_family_s_vectors_are_transformers(
    kind: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    model = save(tmp_path, kind, transformers.AutoModel, **fields)
    vectors = opened(tmp_path).embed(flatten(IDS))
    expected = np.stack([hidden_of(model, text).mean(axis=0) for text in IDS])
    np.testing.assert_allclose(vectors, expected, atol=2e-5)
    assert least_cosine(opened(tmp_path, weight_dtype="fixed16"), expected) >= LEAST_COSINE


@pytest.mark.parametrize("isa", [Isa.PORTABLE, Isa.AVX2, Isa.AVX512])
def test_minilm_s_vectors_in_16_bits_are_transformers(isa: Isa) -> None:
    model = transformers.AutoModel.from_pretrained(minilm())
    texts = [(np.array(text) * 257).tolist() for text in IDS[:2]]
    expected = np.stack([hidden_of(model, text).mean(axis=0) for text in texts])
    try:
        embedder = opened(minilm(), weight_dtype="fixed16", isa=isa)
    except UnsupportedSpec:
        pytest.skip(f"no {isa} here")
    assert least_cosine(embedder, expected, texts) >= LEAST_COSINE


def test_the_largest_sums_of_16_bits_fit_their_integers(tmp_path: Path) -> None:
    """Weights of one size, and activations that are all 1."""
    save(tmp_path, "bert", transformers.AutoModel, hidden_size=512, intermediate_size=512)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.startswith("encoder.layer") and tensor.ndim == 2:
            signs = torch.randn(len(tensor), 1).sign()
            tensors[name] = (signs * 0.01).expand_as(tensor).contiguous()
        elif name.startswith("embeddings.LayerNorm"):
            tensors[name] = torch.full_like(tensor, float(name.endswith("bias")))
    save_file(tensors, path, {"format": "pt"})
    exact = opened(tmp_path).embed(flatten(IDS[:2]))
    vectors = opened(tmp_path, weight_dtype="fixed16").embed(flatten(IDS[:2]))
    np.testing.assert_allclose(vectors, exact, atol=1e-3)


def test_an_outlier_leaves_the_others_their_bits(tmp_path: Path) -> None:
    save(tmp_path, "bert", transformers.AutoModel, hidden_size=256, intermediate_size=64)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["embeddings.LayerNorm.bias"][7] = 60.0
    for name, tensor in tensors.items():
        if name.startswith("encoder.layer.0") and tensor.shape[1:] == (256,):
            tensor[:, 7] = 0.0  # which would drown them
    save_file(tensors, path, {"format": "pt"})
    exact = opened(tmp_path).embed(flatten(IDS[:2]))
    assert least_cosine(opened(tmp_path, weight_dtype="fixed16"), exact, IDS[:2]) >= LEAST_COSINE


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-5), ("fixed16", 1e-3)])
@pytest.mark.parametrize(("kind", "fields"), FAMILIES)
def test_a_family_s_scores_are_transformers(
    kind: str, fields: dict[str, Any], dtype: str, atol: float, tmp_path: Path
) -> None:
    auto_class = transformers.AutoModelForSequenceClassification
    model = save(tmp_path, kind, auto_class, num_labels=1, **fields)
    seconds = [1, 2, 120, 9, 17]
    given = flatten(IDS, seconds if kind in ("bert", "electra") else None)
    scores = opened(tmp_path, weight_dtype=dtype).embed(given)
    for text, second, score in zip(IDS, seconds, scores, strict=True):
        inputs = {"input_ids": torch.tensor([text])}
        if kind in ("bert", "electra"):
            inputs["token_type_ids"] = (torch.arange(len(text)) >= second).long()[None]
        with torch.inference_mode():
            expected = model(**inputs).logits[0].sigmoid().numpy()
        np.testing.assert_allclose(score, expected, atol=atol)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fixed16"])
@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_a_text_s_bits_do_not_depend_on_batch_mates(kind: str, dtype: str, tmp_path: Path) -> None:
    save(tmp_path, kind, transformers.AutoModel, **dict(FAMILIES)[kind])
    rounds = dtype == "bfloat16"
    kv_dtype = dtype if rounds else "float32"
    options = {"weight_dtype": dtype, "kv_dtype": kv_dtype, "rounds_activations": rounds}
    embedder = opened(tmp_path, **options)
    together = embedder.embed(flatten(IDS))
    backwards = opened(tmp_path, threads=1, **options).embed(flatten(IDS[::-1]))[::-1]
    alone = np.concatenate([embedder.embed(flatten([text])) for text in IDS])
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(together, backwards)


@pytest.mark.parametrize(("mode", "row"), [("cls", 0), ("lasttoken", -1)])
def test_one_token_is_pooled_where_the_files_say_so(mode: str, row: int, tmp_path: Path) -> None:
    model = save(tmp_path, "bert", transformers.AutoModel)
    add_modules(tmp_path, {"pooling_mode": mode})
    expected = np.stack([hidden_of(model, text)[row] for text in IDS])
    np.testing.assert_allclose(opened(tmp_path).embed(flatten(IDS)), expected, atol=2e-5)


def test_embeddinggemma_s_vectors_are_transformers(tmp_path: Path) -> None:
    model = save(tmp_path, "gemma3_text", transformers.AutoModel, **GEMMA)
    add_modules(tmp_path, {"pooling_mode_mean_tokens": True}, "Normalize")
    expected = np.stack([hidden_of(model, text).mean(axis=0) for text in IDS])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(opened(tmp_path).embed(flatten(IDS)), expected, atol=2e-5)


def test_an_encoder_without_a_pooling_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "gemma3_text", transformers.AutoModelForCausalLM, **GEMMA)
    with pytest.raises(ModelError, match="its tokens see those to come, so it cannot generate"):
        open_model(tmp_path)


def test_dense_modules_multiply_the_vector(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    transformer = Transformer(str(minilm()))
    layers = [Pooling(384, "mean"), Dense(384, 96, bias=False), Dense(96, 24), Normalize()]
    model = SentenceTransformer(modules=[transformer, *layers], device="cpu")
    model.save(str(tmp_path))
    texts = Encoder(str(tmp_path)).encode([Text(text, add_special_tokens=True) for text in TEXTS])
    vectors = opened(tmp_path).embed(flatten(texts))
    np.testing.assert_allclose(vectors, model.encode(TEXTS), atol=1e-5)


def test_the_last_classifier_pooling_is_the_mean(tmp_path: Path) -> None:
    auto_class = transformers.AutoModelForSequenceClassification
    fields = {**dict(FAMILIES)["modernbert"], "classifier_pooling": "mean"}
    model = save(tmp_path, "modernbert", auto_class, num_labels=1, **fields)
    with torch.inference_mode():
        expected = model(torch.tensor([IDS[2]])).logits.sigmoid().numpy()
    np.testing.assert_allclose(opened(tmp_path).embed(flatten(IDS[2:3])), expected, atol=1e-5)


def test_the_first_files_of_bert_name_norms_otherwise(tmp_path: Path) -> None:
    model = save(tmp_path, "bert", transformers.AutoModelForMaskedLM)
    path = tmp_path / "model.safetensors"
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(old | {"bert.embeddings.position_ids": torch.arange(512)[None]}, path)
    expected = hidden_of(model.bert, IDS[1]).mean(axis=0)
    vectors = opened(tmp_path).embed(flatten(IDS[1:2]))
    np.testing.assert_allclose(vectors[0], expected, atol=2e-5)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save(tmp_path, "bert", transformers.AutoModel)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["encoder.layer.1.output.dense.bias"]
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"'encoder\.layer\.1\.output\.dense\.bias' is missing"):
        open_model(tmp_path)


def test_a_head_of_two_labels_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "bert", transformers.AutoModelForSequenceClassification, num_labels=2)
    with pytest.raises(ModelError, match="a classifier of 2 labels is not supported"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("kind", "fields", "why"),
    [
        ("bert", {"is_decoder": True}, "'is_decoder'"),
        ("electra", {"embedding_size": 16}, "'embedding_size': 16, not the hidden_size 32"),
        ("bert", {"hidden_act": "relu"}, "'hidden_act': 'relu', not 'gelu'"),
    ],
)
def test_what_the_core_cannot_is_not_lowered(
    kind: str, fields: dict[str, Any], why: str, tmp_path: Path
) -> None:
    save(tmp_path, kind, transformers.AutoModel, **fields)
    with pytest.raises(NotLowered, match=why):
        open_model(tmp_path)
