"""Where spans go: the protocol of OpenTelemetry's exporter, and what it takes."""

from collections.abc import Mapping
from importlib.util import find_spec
from urllib.parse import urlsplit

from headrace.errors import ConfigError

FLAG = "--otlp-traces-endpoint"
HTTP, GRPC = "http/protobuf", "grpc"
TRACES_PROTOCOL, PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
EXPORTERS = {
    HTTP: "opentelemetry.exporter.otlp.proto.http",
    GRPC: "opentelemetry.exporter.otlp.proto.grpc",
}
SCHEMES = {HTTP: ("http", "https"), GRPC: ("http", "https", "grpc")}


def protocol_of(environ: Mapping[str, str]) -> str:
    """Return the protocol that the environment asks for; http/protobuf without it."""
    return environ.get(TRACES_PROTOCOL) or environ.get(PROTOCOL) or HTTP


def check_otlp(endpoint: str, environ: Mapping[str, str]) -> None:
    """Check that spans can be sent to a URL.

    Raises:
        ConfigError: the URL or the protocol is wrong, or a package is missing.
    """
    protocol = protocol_of(environ)
    if protocol not in EXPORTERS:
        raise ConfigError(
            f"{FLAG}: the protocol {protocol} is not known; it must be {HTTP} or {GRPC}"
        )
    url = urlsplit(endpoint)
    if url.scheme not in SCHEMES[protocol] or not url.hostname:
        raise ConfigError(f"{FLAG} {endpoint} is not a URL such as http://localhost:4318/v1/traces")
    if not (has_module("opentelemetry.sdk.trace") and has_module(EXPORTERS[protocol])):
        name = EXPORTERS[protocol].replace(".", "-")
        remedy = "pip install 'headrace[otel]'" if protocol == HTTP else f"pip install {name}"
        raise ConfigError(f"{FLAG} needs opentelemetry-sdk and {name}; {remedy}")


def has_module(name: str) -> bool:
    """Whether a module can be imported."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a package that it is in
        return False
