"""Adapters are found by name, in the registry or in a folder, and nowhere else."""

import os
from pathlib import Path

import pytest

from headrace.errors import InvalidValue
from headrace.ipc.adapter_registry import AdapterRegistry, AdapterUsage


def write(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text("x")
    return folder


@pytest.fixture
def registry(tmp_path: Path) -> AdapterRegistry:
    (tmp_path / "run").mkdir()
    write(tmp_path / "all" / "one")
    write(tmp_path / "outside")
    (tmp_path / "all" / "link").symlink_to(tmp_path / "outside")
    return AdapterRegistry(str(tmp_path / "run"), str(tmp_path / "all"))


def test_added_adapter_is_found_until_it_is_removed(
    registry: AdapterRegistry, tmp_path: Path
) -> None:
    source = registry.add("org/name", str(tmp_path / "outside"))
    assert registry.find("org/name") == source
    assert list(registry) == [source]
    assert registry.remove("org/name")
    assert registry.find("org/name") is None
    assert not registry.remove("org/name")


def test_usage_is_that_of_all_replicas(registry: AdapterRegistry, tmp_path: Path) -> None:
    assert registry.usage is None
    run_dir = str(tmp_path / "run")
    for replica, (running, waiting) in enumerate([(["a"], ["b"]), (["b", "c"], [])]):
        usage = AdapterUsage(2, running, waiting, 10.0 + replica)
        AdapterRegistry(run_dir, None, replica).report(usage)
    assert registry.usage == AdapterUsage(2, ["a", "b", "c"], ["b"], 11.0)


def test_folder_has_only_what_is_in_it(registry: AdapterRegistry) -> None:
    found = registry.find("one")
    assert found is not None
    assert found.name == "one"
    for name in ("two", "link", "..", ".", "../outside", "one/../one", "", "x" * 1000, "\0"):
        assert registry.find(name) is None, name


def test_digest_changes_with_the_files(registry: AdapterRegistry, tmp_path: Path) -> None:
    before = registry.find("one")
    weights = tmp_path / "all" / "one" / "adapter_model.safetensors"
    weights.write_text("y")
    os.utime(weights, ns=(1, 1))
    after = registry.find("one")
    assert before is not None
    assert after is not None
    assert before.digest != after.digest


@pytest.mark.parametrize(
    ("name", "path", "text"),
    [
        ("", "outside", "lora_name: must have 1 to 80 characters"),
        ("x" * 81, "outside", "lora_name: must have 1 to 80 characters"),
        ("a", "../outside", "must not have '..'"),
        ("a", "missing", "is no adapter"),
        ("a", "a\0b", "is no adapter"),
    ],
)
def test_bad_name_or_path_is_refused(
    registry: AdapterRegistry, name: str, path: str, text: str
) -> None:
    with pytest.raises(InvalidValue, match=text):
        registry.add(name, path)


def test_broken_adapter_is_discarded_once(registry: AdapterRegistry, tmp_path: Path) -> None:
    source = registry.add("a", str(tmp_path / "outside"))
    other = registry.add("a", str(tmp_path / "all" / "one"))
    registry.discard(source)
    assert registry.find("a") == other
    registry.discard(other)
    assert registry.find("a") is None
