"""Embedding models: decoders by their last token, encoders pooled, both as their files say."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from embedding_models import LAST, TEXTS, add_logit_score, add_modules, minilm
from engine_configs import execution_config
from safetensors.torch import load_file, save_file

from headrace.config.config import ServerConfig
from headrace.config.model_card import read_card
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor
from headrace.engine_proc.worker.execution.embedder import Embedder
from headrace.engine_proc.worker.execution.executor import Batch, Floats
from headrace.engine_proc.worker.hf.encoder_executor import EncoderExecutor
from headrace.engine_proc.worker.hf.model import TransformersModel
from headrace.engine_proc.worker.model_opener import open_for
from headrace.engine_proc.worker.models.dense_layers import DenseLayer
from headrace.engine_proc.worker.models.model import DecoderModel, open_model
from headrace.errors import ModelError
from headrace.model.pooling import Pooling, PoolingKind
from headrace.tokenizer_proc.encoding.encoder import Encoder
from headrace.tokenizer_proc.jobs.stages import Text

PAGE_TOKENS = 16
IDS = [[17, 3, 94, 55, 8, 61, 42, 7, 23], [88, 31], [12, 70, 5, 64, 29, 90]]
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 1,
}


def flatten(texts: Sequence[Sequence[int]], starts: Sequence[int] | None = None) -> Batch:
    """A batch of texts, or of their rest from a position on, that asks for each one's vector."""
    counts = [len(text) for text in texts]
    positions = [
        np.arange(s, s + n) for s, n in zip(starts or [0] * len(texts), counts, strict=True)
    ]
    return Batch(
        token_ids=np.concatenate(texts).astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        sequences=np.repeat(np.arange(len(texts)), counts).astype(np.int32),
        page_table=np.arange(len(texts), dtype=np.int32)[:, None],
        logit_rows=(np.cumsum(counts) - 1).astype(np.int32),
    )


def save_tiny(folder: Path, model_type: str, **differences: Any) -> Any:
    """Save a random base model, without a head."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **TINY | differences)
    model = transformers.AutoModel.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


def hidden_of(model: Any, text: Sequence[int]) -> Floats:
    with torch.inference_mode():
        hidden: Floats = model(torch.tensor([text])).last_hidden_state[0].numpy()
    return hidden


def encoder(folder: Path) -> EncoderExecutor:
    model = open_for(execution_config(folder, max_model_len=60, model_impl="transformers"))
    assert isinstance(model, TransformersModel)
    assert model.pooling is not None
    return EncoderExecutor(model, model.pooling.kind)


def test_minilm_gives_the_vectors_of_sentence_transformers() -> None:
    from sentence_transformers import SentenceTransformer  # seconds, for this test only

    folder = minilm()
    card = read_card(ServerConfig(model=str(folder)))
    assert card.pooling == Pooling(PoolingKind.MEAN, normalize=True, max_tokens=256)
    assert card.max_model_len == 256
    tokenizer = Encoder(str(folder))
    texts = tokenizer.encode([Text(text, add_special_tokens=True) for text in TEXTS])
    embedder = Embedder(encoder(folder), normalize=card.pooling.normalize)
    vectors = embedder.embed(flatten(texts))
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    assert ((vectors * expected).sum(axis=1) >= 0.9999).all()
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    alone = np.concatenate([embedder.embed(flatten([text])) for text in texts])
    np.testing.assert_allclose(vectors, alone, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "differences"),
    [
        ("bert", {}),
        ("roberta", {}),
        ("xlm-roberta", {}),
        ("electra", {"embedding_size": 32}),
        ("distilbert", {"dim": 64, "hidden_dim": 80, "n_layers": 2, "n_heads": 4}),
        (
            "modernbert",
            {"local_attention": 4, "layer_types": ["full_attention", "sliding_attention"]},
        ),
    ],
)
def test_an_encoder_sees_what_it_sees_in_transformers(
    model_type: str, differences: dict[str, Any], tmp_path: Path
) -> None:
    model = save_tiny(tmp_path, model_type, **differences)
    vectors = encoder(tmp_path).embed(flatten(IDS))
    expected = np.stack([hidden_of(model, text).mean(axis=0) for text in IDS])
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


@pytest.mark.parametrize(("mode", "row"), [("cls", 0), ("lasttoken", -1)])
def test_one_token_speaks_for_the_text_where_the_files_say_so(
    mode: str, row: int, tmp_path: Path
) -> None:
    model = save_tiny(tmp_path, "bert")
    add_modules(tmp_path, {"pooling_mode": mode})
    vectors = encoder(tmp_path).embed(flatten(IDS))
    expected = np.stack([hidden_of(model, text)[row] for text in IDS])
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_a_bert_saved_with_another_head_embeds_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("bert", **TINY)
    model = transformers.AutoModelForMaskedLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    vectors = encoder(tmp_path).embed(flatten(IDS[:1]))
    np.testing.assert_allclose(
        vectors[0], hidden_of(model.base_model, IDS[0]).mean(axis=0), atol=1e-5
    )


QWEN3 = {"num_key_value_heads": 2, "head_dim": 16}


def save_qwen3(folder: Path, **differences: Any) -> Any:
    model = save_tiny(folder, "qwen3", **QWEN3 | differences)
    add_modules(folder, LAST, "Normalize")
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_gives_its_last_hidden_state(tied: bool, tmp_path: Path) -> None:
    reference = save_qwen3(tmp_path, tie_word_embeddings=tied)
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")  # no prefix, no head
    model = open_model(tmp_path)
    assert model.pooling == Pooling(PoolingKind.LAST, normalize=True, max_tokens=64)
    executor = CpuExecutor(
        model.spec, model.weights, num_pages=3, page_tokens=PAGE_TOKENS, kv_dtype="float32"
    )
    expected = np.stack([hidden_of(reference, text)[-1] for text in IDS])
    lengths = np.linalg.norm(expected, axis=1, keepdims=True)
    whole = Embedder(executor, normalize=model.pooling.normalize).embed(flatten(IDS))
    np.testing.assert_allclose(whole, expected / lengths, atol=1e-5)
    executor.embed(flatten([text[:-1] for text in IDS]))
    rest = executor.embed(flatten([text[-1:] for text in IDS], [len(t) - 1 for t in IDS]))
    np.testing.assert_allclose(rest, expected, atol=1e-4)


def test_a_decoder_saved_with_its_head_embeds_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3", **TINY | QWEN3)
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    reference.save_pretrained(tmp_path)
    assert open_model(tmp_path).pooling is None, "without modules.json, it generates"
    add_modules(tmp_path, LAST)
    model = open_model(tmp_path)
    executor = CpuExecutor(
        model.spec, model.weights, num_pages=3, page_tokens=PAGE_TOKENS, kv_dtype="float32"
    )
    vectors = executor.embed(flatten(IDS))
    expected = np.stack([hidden_of(reference.model, text)[-1] for text in IDS])
    np.testing.assert_allclose(vectors, expected, atol=1e-4)


@pytest.mark.parametrize("impl", ["auto", "transformers"])
def test_a_decoder_is_not_pooled_by_the_mean(impl: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3", **QWEN3)
    add_modules(tmp_path, {"pooling_mode_mean_tokens": True})
    with pytest.raises(ModelError, match="pools a decoder by mean"):
        open_for(execution_config(tmp_path, model_impl=impl))


def test_a_missing_tensor_of_an_encoder_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, "bert")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["encoder.layer.1.output.dense.bias"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"'encoder\.layer\.1\.output\.dense\.bias' is missing"):
        encoder(tmp_path)


def test_a_vector_of_zeros_stays_one() -> None:
    class Silent:
        def embed(self, batch: Batch) -> Floats:
            return np.zeros((1, 4), np.float32)

    vectors = Embedder(Silent(), normalize=True).embed(flatten([[1]]))
    np.testing.assert_array_equal(vectors, np.zeros((1, 4)))


def test_a_step_within_a_prompt_makes_no_vectors() -> None:
    class Within:
        def embed(self, batch: Batch) -> Floats:
            return np.zeros((0, 4), np.float32)

    dense = (DenseLayer(np.ones((2, 4), np.float32)),)
    assert len(Embedder(Within(), normalize=True, dense=dense).embed(flatten([[1]]))) == 0


def test_an_embedding_model_that_can_be_lowered_is(tmp_path: Path) -> None:
    save_qwen3(tmp_path)
    assert isinstance(open_for(execution_config(tmp_path)), DecoderModel)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("qwen3", QWEN3), ("llama", {"num_key_value_heads": 2}), ("gemma", QWEN3)],
)
def test_a_decoder_s_head_scores_as_in_transformers(
    kind: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **TINY | fields | {"num_labels": 1})
    auto_class = transformers.AutoModelForSequenceClassification
    reference = auto_class.from_config(config, dtype=torch.float32).eval()
    reference.save_pretrained(tmp_path)
    model = open_model(tmp_path)
    assert model.pooling is not None
    assert model.pooling.scores
    executor = CpuExecutor(
        model.spec, model.weights, num_pages=3, page_tokens=PAGE_TOKENS, kv_dtype="float32"
    )
    scores = Embedder(executor, normalize=False, dense=model.dense).embed(flatten(IDS))
    with torch.inference_mode():
        expected = [reference(torch.tensor([text])).logits[0].sigmoid().numpy() for text in IDS]
    np.testing.assert_allclose(scores, expected, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_reranker_scores_by_the_logits_of_two_tokens(tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3", **TINY | QWEN3, tie_word_embeddings=tied)
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    reference.save_pretrained(tmp_path)
    add_logit_score(tmp_path, yes=7, no=3)
    scores = scores_of(open_model(tmp_path))
    expected = [torch.sigmoid(row[7] - row[3]).numpy() for row in last_logits(reference)]
    np.testing.assert_allclose(scores, expected, atol=1e-5)


def scores_of(model: DecoderModel) -> Floats:
    """Return the score of each text of `IDS`."""
    executor = CpuExecutor(
        model.spec, model.weights, num_pages=3, page_tokens=PAGE_TOKENS, kv_dtype="float32"
    )
    return Embedder(executor, normalize=False, dense=model.dense).embed(flatten(IDS))[:, 0]


def last_logits(reference: Any) -> list[torch.Tensor]:
    """Return the logits behind each text of `IDS`."""
    with torch.inference_mode():
        return [reference(torch.tensor([text])).logits[0, -1] for text in IDS]


SOFTCAP = QWEN3 | {"final_logit_softcapping": 0.5, "layer_types": ["full_attention"] * 2}
BOTH = {"classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"}
YES = {"classifier_from_token": ["yes"], "method": "no_post_processing"}


@pytest.mark.parametrize(
    ("kind", "fields", "overrides"),
    [
        ("qwen3", QWEN3, BOTH),
        ("gemma", QWEN3, YES),
        ("gemma2", SOFTCAP, BOTH),
        ("gemma2", SOFTCAP, YES),
    ],
)
def test_tokens_that_overrides_name_score(
    kind: str, fields: dict[str, Any], overrides: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **TINY | fields)
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    reference.save_pretrained(tmp_path)
    vocabulary = {"model": {"type": "BPE", "vocab": {"no": 3, "yes": 7}, "merges": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert open_model(tmp_path).pooling is None
    scores = scores_of(open_model(tmp_path, hf_overrides=json.dumps(overrides)))
    sign = len(overrides["classifier_from_token"]) - 1
    expected = [torch.sigmoid(row[7] - sign * row[3]).numpy() for row in last_logits(reference)]
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert np.ptp(scores) > 0.01


def test_a_config_s_activation_holds_for_its_tokens(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3", **TINY | QWEN3)
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    reference.save_pretrained(tmp_path)
    vocabulary = {"model": {"type": "BPE", "vocab": {"yes": 7}, "merges": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    plain = YES | {"sentence_transformers": {"activation_fn": "torch.nn.Identity"}}
    scores = scores_of(open_model(tmp_path, hf_overrides=json.dumps(plain)))
    np.testing.assert_allclose(scores, [row[7] for row in last_logits(reference)], atol=1e-5)


def test_overrides_are_those_of_a_config(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3", **QWEN3)
    add_modules(tmp_path, LAST)
    longer = open_for(execution_config(tmp_path, hf_overrides='{"max_position_embeddings": 128}'))
    assert isinstance(longer, DecoderModel)
    assert longer.spec.max_position == 128
    unknown = execution_config(tmp_path, hf_overrides='{"spin": 1}')
    with pytest.raises(ModelError, match="a qwen3 model has 'spin': 1, which is not supported"):
        open_for(unknown)
    with pytest.raises(ModelError, match="runs in transformers, which takes no --hf-overrides"):
        open_for(execution_config(tmp_path, hf_overrides="{}", model_impl="transformers"))
