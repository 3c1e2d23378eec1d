"""Which extra brings what is missing."""

import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from headrace import extras
from headrace.errors import ConfigError

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_extras_install_what_is_looked_for() -> None:
    for extra, packages in extras.PACKAGES.items():
        texts = PROJECT["optional-dependencies"][extra]
        names = {Requirement(text).name for text in texts}
        assert {extras.DISTRIBUTIONS.get(name, name) for name in packages} <= names, extra


def test_no_package_of_an_extra_is_a_dependency() -> None:
    names = {Requirement(text).name for text in PROJECT["dependencies"]}
    for packages in extras.PACKAGES.values():
        assert not {extras.DISTRIBUTIONS.get(name, name) for name in packages} & names


@pytest.mark.parametrize(
    ("extra", "package", "says"),
    [
        ("modules", "transformers", "package transformers is missing; `pip install 'headrace[mod"),
        ("images", "PIL", "package pillow is missing; `pip install 'headrace[images]'`"),
        (
            "otel",
            "opentelemetry.sdk",
            "package opentelemetry-sdk is missing; `pip install 'headrace[otel]'`",
        ),
        (
            "mistral",
            "mistral_common",
            "package mistral-common is missing; `pip install 'headrace[mistral]'`",
        ),
        ("ray", "ray", "package ray is missing; `pip install 'headrace[ray]'`"),
        ("gpu", "triton", "package triton is missing; `pip install 'headrace[gpu]'`"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    extra: str, package: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else sys)
    with pytest.raises(ConfigError, match="MODEL: the package") as caught:
        extras.require(extra, "MODEL")
    assert says in str(caught.value)


def test_a_package_that_is_not_needed_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else sys)
    extras.require("images", "MODEL", but=("torch",))
    with pytest.raises(ConfigError, match="the package torch is missing"):
        extras.require("images", "MODEL")


def test_nothing_is_missing_where_all_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: sys)
    assert {extras.missing(extra) for extra in extras.PACKAGES} == {""}
    extras.require("gpu", "a GPU")


def test_part_of_a_package_that_is_missing_is_missing() -> None:
    assert not extras.is_installed("no_such_package.part")
