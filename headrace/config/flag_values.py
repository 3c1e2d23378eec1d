"""What flags refuse: values below a limit, above it, and none of the choices."""

from collections.abc import Sequence

from headrace.errors import ConfigError


def flag_name(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


def at_least(name: str, value: int, limit: int) -> None:
    """Refuse a flag below its limit."""
    if value < limit:
        raise ConfigError(f"{flag_name(name)} {value} is too small; it must be at least {limit}")


def at_most(name: str, value: int, limit: int) -> None:
    """Refuse a flag above its limit."""
    if value > limit:
        raise ConfigError(f"{flag_name(name)} {value} is too large; it must be at most {limit}")


def one_of(name: str, value: object, choices: Sequence[str] | None) -> None:
    """Refuse a flag that is none of its choices."""
    if choices and value not in choices:
        allowed = ", ".join(choices)
        raise ConfigError(f"{flag_name(name)} {value} is not known; it must be one of {allowed}")
