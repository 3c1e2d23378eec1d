"""Packages that a plain install leaves out, by the extra that installs them."""

import importlib.util

from headrace.errors import ConfigError

PACKAGES = {
    "gpu": ("torch", "triton"),
    "images": ("PIL", "torch", "transformers"),
    "mistral": ("mistral_common", "sentencepiece"),
    "modules": ("torch", "transformers"),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    "ray": ("ray",),
}
DISTRIBUTIONS = {  # where the name of the package is another
    "PIL": "pillow",
    "mistral_common": "mistral-common",
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
}


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it may be part of another that is missing, too."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def missing(extra: str, but: tuple[str, ...] = ()) -> str:
    """Return which package of an extra is missing, and the remedy; "" where all are there.

    Those in `but` need not be.
    """
    for package in PACKAGES[extra]:
        if package not in but and not is_installed(package):
            name = DISTRIBUTIONS.get(package, package)
            return f"the package {name} is missing; `pip install 'headrace[{extra}]'`"
    return ""


def require(extra: str, needing: str, but: tuple[str, ...] = ()) -> None:
    """Check for the packages of an extra.

    Args:
        needing: what needs them, the beginning of the error's text.
        but: those that it does not need.

    Raises:
        ConfigError: one is missing; the text names it and the extra.
    """
    lack = missing(extra, but)
    if lack:
        raise ConfigError(f"{needing}: {lack}")
