"""Where spans go: the protocol of OpenTelemetry's exporter, and what it takes."""

from collections.abc import Mapping
from urllib.parse import urlsplit

from headrace.errors import ConfigError
from headrace.extras import is_installed, require

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
    require("otel", FLAG)
    if not is_installed(EXPORTERS[protocol]):
        name = EXPORTERS[protocol].replace(".", "-")
        raise ConfigError(f"{FLAG}: the package {name} is missing; `pip install {name}`")
