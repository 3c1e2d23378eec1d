"""What the files beside a model say of its pooling."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ModelError
from headrace.model.pooling import (
    DenseActivation,
    DenseModule,
    Pooling,
    PoolingKind,
    read_dense,
    read_pooling,
)

BERT = {"model_type": "bert", "max_position_embeddings": 512}
CROSS_ENCODER = BERT | {
    "architectures": ["BertForSequenceClassification"],
    "id2label": {"0": "LABEL_0"},
}
ID = DenseActivation.IDENTITY
SIGMOID = DenseActivation.SIGMOID
IDENTITY = "torch.nn.modules.linear.Identity"
QWEN = {"model_type": "qwen3", "max_position_embeddings": 4096}


def write(folder: Path, modules: list[str], **files: Any) -> Path:
    """Write `modules.json`, and other JSON files by stem."""
    steps = [
        {
            "idx": i,
            "name": str(i),
            "path": "1_Pooling" if name == "Pooling" else "",
            "type": f"a.{name}",
        }
        for i, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(steps))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(files.pop("pooling", {})))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_a_decoder_without_modules_generates(tmp_path: Path) -> None:
    assert read_pooling(tmp_path, QWEN) is None


def test_an_encoder_without_modules_is_pooled_by_the_mean(tmp_path: Path) -> None:
    assert read_pooling(tmp_path, BERT) == Pooling(PoolingKind.MEAN, max_tokens=512)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, PoolingKind.FIRST),
        ({"pooling_mode_mean_tokens": True}, PoolingKind.MEAN),
        ({"pooling_mode_lasttoken": True}, PoolingKind.LAST),
        ({"pooling_mode": "lasttoken"}, PoolingKind.LAST),
        ({"pooling_mode": ["cls"]}, PoolingKind.FIRST),
        ({}, PoolingKind.MEAN),
    ],
)
def test_old_and_new_files_name_the_kind(
    settings: dict[str, Any], kind: PoolingKind, tmp_path: Path
) -> None:
    folder = write(tmp_path, ["Transformer", "Pooling", "Normalize"], pooling=settings)
    assert read_pooling(folder, QWEN) == Pooling(kind, normalize=True, max_tokens=4096)


def test_prompts_are_read_by_their_names(tmp_path: Path) -> None:
    named = {"query": "q: ", "Clustering": "c: ", "document": None}
    other = {"prompts": named, "default_prompt_name": None}
    folder = write(tmp_path, ["Pooling"], config_sentence_transformers=other)
    pooling = read_pooling(folder, BERT)
    assert pooling is not None
    assert pooling.prompts == {"query": "q: ", "clustering": "c: ", "document": ""}
    (folder / "1_Pooling" / "config.json").write_text('{"include_prompt": false}')
    pooling = read_pooling(folder, BERT)
    assert pooling is not None and not pooling.prompts
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": 1}}')
    with pytest.raises(ModelError, match="not texts by name"):
        read_pooling(folder, BERT)


def test_without_a_normalizing_step_vectors_keep_their_length(tmp_path: Path) -> None:
    pooling = read_pooling(write(tmp_path, ["Transformer", "Pooling"]), BERT)
    assert pooling is not None
    assert not pooling.normalize


@pytest.mark.parametrize(
    ("config", "files", "limit"),
    [
        (BERT, {"sentence_bert_config": {"max_seq_length": 256}}, 256),
        (BERT, {"sentence_bert_config": {"max_seq_length": 1024}}, 512),
        (BERT, {"tokenizer_config": {"model_max_length": 128}}, 128),
        (BERT, {"tokenizer_config": {"model_max_length": 1e30}}, 512),
        (BERT | {"model_type": "roberta", "max_position_embeddings": 514}, {}, 512),
        ({"model_type": "bert"}, {}, None),
    ],
)
def test_a_text_is_as_long_as_files_and_positions_allow(
    config: dict[str, Any], files: dict[str, Any], limit: int | None, tmp_path: Path
) -> None:
    pooling = read_pooling(write(tmp_path, ["Transformer", "Pooling"], **files), config)
    assert pooling is not None
    assert pooling.max_tokens == limit


@pytest.mark.parametrize(
    ("modules", "files", "named"),
    [
        (["Transformer", "Pooling", "CNN"], {}, r"modules\.json: a CNN module"),
        (
            ["Transformer", "Pooling"],
            {"pooling": {"pooling_mode_max_tokens": True}},
            r"1_Pooling/config\.json: pooling by \['max'\]",
        ),
        (
            ["Transformer", "Pooling"],
            {"pooling": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}},
            "cls",
        ),
        (
            ["Transformer", "Pooling"],
            {"sentence_bert_config": {"do_lower_case": True}},
            r"sentence_bert_config\.json: do_lower_case",
        ),
        (["Transformer", "Pooling"], {"pooling": []}, r"1_Pooling/config\.json: cannot be read"),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(
    modules: list[str], files: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=named):
        read_pooling(write(tmp_path, modules, **files), BERT)


@pytest.mark.parametrize(
    ("extra", "beside", "activation"),
    [
        ({}, None, DenseActivation.SIGMOID),
        ({"sbert_ce_default_activation_function": IDENTITY}, None, ID),
        (
            {"sentence_transformers": {"activation_fn": IDENTITY}},
            None,
            ID,
        ),
        ({}, {"activation_fn": IDENTITY}, ID),
    ],
)
def test_a_cross_encoder_says_what_becomes_of_its_number(
    tmp_path: Path,
    extra: dict[str, Any],
    beside: dict[str, Any] | None,
    activation: DenseActivation,
) -> None:
    if beside is not None:
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(beside))
    found = read_pooling(tmp_path, CROSS_ENCODER | extra)
    assert found == Pooling(PoolingKind.FIRST, max_tokens=512, scores=True, activation=activation)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, "a classifier of 2 labels is not supported"),
        ({"sbert_ce_default_activation_function": "a.Tanh"}, "activation a.Tanh is not supported"),
    ],
)
def test_other_classifiers_are_refused(tmp_path: Path, extra: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        read_pooling(tmp_path, CROSS_ENCODER | extra)


def test_a_decoder_s_head_reads_the_last_token(tmp_path: Path) -> None:
    found = read_pooling(tmp_path, QWEN | CROSS_ENCODER | {"model_type": "qwen3"})
    assert found == Pooling(PoolingKind.LAST, max_tokens=512, scores=True, activation=SIGMOID)


def test_dense_modules_are_read_in_their_order(tmp_path: Path) -> None:
    dense = {"in_features": 8, "activation_function": "torch.nn.modules.activation.Tanh"}
    write(tmp_path, ["Transformer", "Pooling", "Dense", "Dense", "Normalize"])
    modules = json.loads((tmp_path / "modules.json").read_text())
    for index, size in ((2, 32), (3, 4)):
        modules[index]["path"] = f"{index}_Dense"
        (tmp_path / f"{index}_Dense").mkdir()
        config = json.dumps(dense | {"out_features": size})
        (tmp_path / f"{index}_Dense" / "config.json").write_text(config)
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    found = read_pooling(tmp_path, BERT)
    assert found is not None
    assert found.dense == (
        DenseModule("2_Dense", 32, DenseActivation.TANH),
        DenseModule("3_Dense", 4, DenseActivation.TANH),
    )


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"out_features": 4, "activation_function": "a.Mish"}, "activation mish is not supported"),
        ({}, "out_features is None"),
        ({"out_features": 4, "use_residual": True}, "use_residual is not supported"),
        ({"out_features": 4, "module_input_name": "token_embeddings"}, "not sentence_embedding"),
    ],
)
def test_other_dense_modules_are_refused(tmp_path: Path, config: Any, says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=says):
        read_dense(tmp_path, "")


def test_a_head_that_is_not_to_be_used_is_not(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.models.Transformer"}]')
    found = read_pooling(tmp_path, CROSS_ENCODER)
    assert found is not None
    assert found.kind is PoolingKind.MEAN
