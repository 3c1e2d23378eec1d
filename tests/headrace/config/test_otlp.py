"""Where spans go, and what that takes."""

import sys

import pytest

from headrace.config.config import config_of
from headrace.config.otlp import check_otlp, protocol_of
from headrace.errors import ConfigError
from headrace.exit_status import ExitStatus

URL = "http://localhost:4318/v1/traces"


def lack(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Have a package be missing."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else sys)


def test_missing_exporter_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    lack(monkeypatch, "opentelemetry.sdk")
    with pytest.raises(
        ConfigError, match=r"opentelemetry-sdk is missing.*headrace\[otel\]"
    ) as caught:
        config_of({"otlp_traces_endpoint": URL}, has_gpus=False)
    assert caught.value.exit_status is ExitStatus.BAD_FLAGS
    lack(monkeypatch, "opentelemetry.exporter.otlp.proto.grpc")
    with pytest.raises(ConfigError, match=r"pip install opentelemetry-exporter-otlp-proto-grpc`$"):
        check_otlp("grpc://localhost:4317", {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"})


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://localhost:4317", "http://", "x"])
def test_endpoint_that_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="such as http://localhost:4318/v1/traces"):
        check_otlp(url, {})


def test_endpoint_is_taken_where_the_exporter_is_installed() -> None:
    assert config_of({"otlp_traces_endpoint": URL}, has_gpus=False).otlp_traces_endpoint == URL


def test_protocol_is_that_of_the_environment() -> None:
    general = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    assert protocol_of({}) == "http/protobuf"
    assert protocol_of(general) == "grpc"
    assert protocol_of(general | {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "x"}) == "x"
    with pytest.raises(ConfigError, match=r"it must be http/protobuf or grpc"):
        check_otlp(URL, {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})
