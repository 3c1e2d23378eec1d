"""The flags of an engine on another machine are read there as they were here."""

from dataclasses import fields
from pathlib import Path

import msgspec
import pytest

from headrace.config.config import ServerConfig
from headrace.config.flags import configs_from_flags
from headrace.config.node_flags import node_flags
from headrace.supervision.engine_groups import SAME_FLAGS

ARGV = (
    *("model", "--dp", "3", "--data-parallel-backend", "ray", "--tp", "2", "--engine", "mock"),
    *("--dtype", "bfloat16", "--kv-cache-dtype", "float32", "--max-num-seqs", "7"),
    *("--no-enable-prefix-caching", "--served-model-name", "name", "--frontend-procs", "2"),
    *("--gpu-memory-utilization", "0.5", "--cudagraph-capture-sizes", "1", "2", "--port", "1"),
)
DIFFERENT = {"data_parallel_size", "data_parallel_backend", "engine_listen", "engine_key_file"}


@pytest.mark.parametrize("on_gpus", [False, True])
def test_a_node_has_the_flags_of_the_server(
    tmp_path: Path, on_gpus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (config,) = configs_from_flags(ARGV)
    (tmp_path / "flags").write_bytes(msgspec.json.encode(node_flags(config, on_gpus)))
    argv = ("--engine-listen", "tcp://a:1", "--engine-key-file", "key", "--config", "flags")
    (there,) = configs_from_flags(argv, has_gpus=not on_gpus)
    differing = {
        field.name
        for field in fields(ServerConfig)
        if getattr(there, field.name) != getattr(config, field.name)
    }
    assert differing == DIFFERENT | {"device", "model", "port"}
    assert there.device == ("cuda" if on_gpus else "cpu")
    assert there.model == str(tmp_path / "model")
    assert not differing & set(SAME_FLAGS)


def test_a_model_of_the_hub_is_named_as_it_is() -> None:
    assert node_flags(ServerConfig(model="owner/name"), on_gpus=False)["model"] == "owner/name"
    assert "model" not in node_flags(ServerConfig(), on_gpus=False)


def test_paths_of_this_machine_are_whole_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "draft").mkdir()
    (tmp_path / "chat.jinja").touch()
    config = ServerConfig(
        speculative="draft_model",
        draft_model="draft",
        chat_template="chat.jinja",
        kv_store="store",
    )
    found = node_flags(config, on_gpus=False)
    assert found["draft_model"] == str(tmp_path / "draft")
    assert found["chat_template"] == str(tmp_path / "chat.jinja")
    assert found["kv_store"] == str(tmp_path / "store"), "which an engine makes"
    assert found["mock_profile"] == "zero"
    config = ServerConfig(speculative="draft_model", draft_model="owner/name")
    assert node_flags(config, on_gpus=False)["draft_model"] == "owner/name"
