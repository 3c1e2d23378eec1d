"""The command line: `ServerConfig` as flags, aliases of vLLM and SGLang, and `--config` files.

A flag wins over the file of `--config`. Nothing is read from the environment but secrets.
"""

import argparse
import dataclasses
import difflib
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import msgspec

from headrace import __version__
from headrace.config.config import AUTO, ServerConfig
from headrace.config.flag_values import flag_name
from headrace.config.foreign_flags import (
    ALIASES,
    Already,
    Meaning,
    RefusedFlag,
    Same,
    SeveralFlags,
    Switch,
    Unused,
)
from headrace.config.model_configs import OF_MODEL, configs_of
from headrace.errors import BAD_JSON, ConfigError

log = logging.getLogger(__name__)

CONFIG = "--config"
MODELS = "models"  # of a file: a list
HELP_COLUMN = 32
# Titles of --help, by the first field that each has.
GROUPS = {
    "model": "the model",
    "host": "network access",
    "tp": "processes",
    "max_model_len": "model execution",
    "max_num_seqs": "scheduling",
    "gpu_memory_utilization": "memory",
    "stream_interval": "requests and responses",
    "metrics_dialect": "logs and metrics",
}
HINTS = get_type_hints(ServerConfig)
FIELDS = {f.name: f for f in dataclasses.fields(ServerConfig)}


def plain_type(hint: Any) -> Any:
    """Return `int` for `int | None`."""
    if get_origin(hint) is types.UnionType:
        return next(t for t in get_args(hint) if t is not types.NoneType)
    return hint


# What each flag means that takes a value or is not ours; our switches mean themselves.
MEANINGS: dict[str, Meaning] = {
    CONFIG: Same("config"),
    **{flag_name(name): Same(name) for name in FIELDS if plain_type(HINTS[name]) is not bool},
    **ALIASES,
}


def is_adapter(argument: str) -> bool:
    """Whether an argument is a value of `--lora-modules`."""
    return argument.startswith("{") or ("=" in argument and not argument.startswith("-"))


# Flags that may be followed by several values, as vLLM has it, and what tells that one is.
SEVERAL: dict[str, Callable[[str], bool]] = {
    name: is_adapter if meaning.field == "lora_modules" else str.isdecimal
    for name, meaning in MEANINGS.items()
    if isinstance(meaning, Same)
    and (meaning.field == "lora_modules" or HINTS.get(meaning.field) == tuple[int, ...])
}
SEVERAL["--remote-engines"] = lambda argument: argument.startswith("tcp:")
SUFFIXES = {"k": 1000, "K": 1 << 10, "m": 10**6, "M": 1 << 20, "g": 10**9, "G": 1 << 30}


class Parser(argparse.ArgumentParser):
    """Raises `ConfigError` where argparse would end the program."""

    def error(self, message: str) -> NoReturn:
        """Raise the error of the command line."""
        raise ConfigError(message)


def whole(text: str) -> int:
    """Return a number; 32k is 32000 and 32K is 32768, as vLLM has it."""
    factor = SUFFIXES.get(text[-1:], 1)
    try:
        return int(text if factor == 1 else text[:-1]) * factor
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number") from None


def replicas(text: str) -> int | str:
    """Return a number, or `auto`."""
    return text if text == AUTO else whole(text)


def number(text: str) -> float:
    """Return a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a number") from None


READERS: dict[type, tuple[Callable[[str], Any], str]] = {
    int: (whole, "N"),
    float: (number, "X"),
    str: (str, "TEXT"),
}


def help_of(field: "dataclasses.Field[Any]") -> str:
    """Return a flag's help, with its default where there is one."""
    text: str = field.metadata["help"]
    choices = field.metadata["choices"]
    if choices:
        text = f"{' | '.join(choices)}: {text}"
    return text if field.default in (None, ()) else f"{text} ({field.default})"


def server_parser(
    prog: str = "launch_server",
    description: str = "Serve a language model with an OpenAI-compatible API.",
) -> Parser:
    """Return the parser of `ServerConfig`: `model` by position, the rest by flag.

    What is not given is not in its result. Help names the command `prog`.
    """
    parser = Parser(
        prog=prog,
        usage="%(prog)s [MODEL ...] [flags]",
        description=description,
        epilog="Flags of vLLM and SGLang are known by their names: see docs/migration.md.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=HELP_COLUMN),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    version = f"headrace {__version__}"
    parser.add_argument("-V", "--version", action="version", version=version)
    parser.add_argument(CONFIG, metavar="FILE", help="flags as YAML, by name")
    group = parser.add_argument_group(GROUPS["model"])
    for field in dataclasses.fields(ServerConfig):
        if field.name in GROUPS and field.name != "model":
            group = parser.add_argument_group(GROUPS[field.name])
        add_field(group, field)
    return parser


def add_field(group: "argparse._ArgumentGroup", field: "dataclasses.Field[Any]") -> None:
    """Add the flag of a field. `ServerConfig` checks its value."""
    hint, name, help = HINTS[field.name], flag_name(field.name), help_of(field)
    if field.name == "model":
        group.add_argument("model", metavar="MODEL", nargs="*", help=help)
    elif get_origin(hint) is tuple:
        read, metavar = READERS[get_args(hint)[0]]
        group.add_argument(name, metavar=metavar, type=read, action="append", help=help)
    elif plain_type(hint) is bool:
        group.add_argument(name, action=argparse.BooleanOptionalAction, help=help)
    else:
        read, metavar = READERS[plain_type(hint)]
        read = replicas if field.name == "data_parallel_size" else read
        group.add_argument(name, metavar=metavar, type=read, help=help)


def from_flags(
    argv: Sequence[str],
    has_gpus: bool = False,
    parser: Parser | None = None,
    num_nodes: int = 1,
) -> ServerConfig:
    """Build the configuration of one model, as `configs_from_flags` does.

    Raises:
        ConfigError: there are several, too.
    """
    configs = configs_from_flags(argv, has_gpus, parser, num_nodes)
    check_only([str(config.model) for config in configs])
    return configs[0]


def check_only(models: Sequence[str]) -> None:
    """Refuse several models."""
    if len(models) > 1:
        names = ", ".join(models)
        raise ConfigError(f"this command takes one MODEL; {len(models)} are given: {names}")


def configs_from_flags(
    argv: Sequence[str],
    has_gpus: bool = False,
    parser: Parser | None = None,
    num_nodes: int = 1,
) -> list[ServerConfig]:
    """Build the configuration of each model from the command line, and the file it names.

    Args:
        has_gpus: whether this machine has some; with them other defaults suit.
        parser: of another command that takes the server's flags.
        num_nodes: of NUMA on this machine.

    Raises:
        ConfigError: a flag is not known or has a value that cannot work; the text names it.
    """
    values = parse(argv, parser)
    path = values.pop("config", None)
    parts: list[dict[str, Any]] = []
    if path is not None:
        file = read_file(Path(path))
        parts = parts_of(file.pop(MODELS, []), f"{CONFIG} {path}: {MODELS}", parser)
        of_file = parse(list(file_flags(file, f"{CONFIG} {path}")), parser)
        if parts and "model" in of_file:
            raise ConfigError(f"{CONFIG} {path} has model and {MODELS}; give one of them")
        values = of_file | values
    names = values.pop("model", ())
    if names:  # as any flag, they win over the file
        parts = [{"model": name} for name in names]
    return configs_of(values, parts, has_gpus, num_nodes)


def parse_one(argv: Sequence[str]) -> dict[str, Any]:
    """Return the values of flags of one model, as `parse` does; `model` is its name.

    Raises:
        ConfigError: there are several, too.
    """
    values = parse(argv)
    names = values.pop("model", ())
    check_only(names)
    return values | ({"model": names[0]} if names else {})


def parse(argv: Sequence[str], parser: Parser | None = None) -> dict[str, Any]:
    """Return the values of flags by field, only of those that are given; all names of `model`."""
    found, unknown = (parser or server_parser()).parse_known_args(list(translate(argv)))
    if unknown:
        raise ConfigError(unknown_flag(unknown[0]))
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in vars(found).items()}
    return {k: v for k, v in values.items() if k != "model" or v}


def unknown_flag(argument: str) -> str:
    """Return the error text for an unexpected argument."""
    name = argument.partition("=")[0]
    if not name.startswith("-"):
        return (
            f"unexpected argument {name}: several MODELs stand side by side; other values need a "
            "flag"
        )
    return f"{name} is not known{suggestion(name, [*own_flags(), *ALIASES])}"


def suggestion(name: str, names: Sequence[str]) -> str:
    """Return the end of a sentence that asks whether another name was meant."""
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else "; --help lists all flags"


def own_flags() -> list[str]:
    """Return our flags, by name."""
    return [CONFIG, *(flag_name(name) for name in FIELDS if name != "model")]


def translate(argv: Sequence[str]) -> Iterator[str]:
    """Yield a command line in our flags. Underscores in names are hyphens.

    Raises:
        ConfigError: a flag asks for what there is not.
    """
    rest = repeated(argv)
    for argument in rest:
        name, equals, given = argument.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        meaning = MEANINGS.get(name)
        if meaning is None:
            yield name + equals + given
        else:
            yield from meant(name, meaning, given if equals else None, rest)


def repeated(argv: Sequence[str]) -> Iterator[str]:
    """Yield a command line where each of several values has a flag: `--x 1 2` is `--x=1 --x=2`."""
    name, has_value = "", True
    for argument in argv:
        if name and SEVERAL[name.replace("_", "-")](argument):
            has_value = True
            yield f"{name}={argument}"
            continue
        if not has_value:
            yield name
        name = argument if argument.replace("_", "-") in SEVERAL else ""
        has_value = not name
        if not name:
            yield argument
    if not has_value:
        yield name


def meant(name: str, meaning: Meaning, given: str | None, rest: Iterator[str]) -> list[str]:
    """Return what a flag is here; its value, if it takes one and none is given, is the next."""
    if isinstance(meaning, RefusedFlag):
        raise ConfigError(f"{name} is not supported; {meaning.instead}")
    if isinstance(meaning, Switch):
        return [flag_name(meaning.field if meaning.on else "no_" + meaning.field)]
    if meaning == Already():
        return []
    value = next(rest, None) if given is None else given
    if value is None:
        raise ConfigError(f"{name} needs a value")
    if isinstance(meaning, Unused):
        log.warning("%s %s changes nothing: %s", name, value, meaning.why)
        return []
    if isinstance(meaning, Already):
        if value not in meaning.values:
            raise ConfigError(f"{name} {value} is not supported; {meaning.instead}")
        return []
    if isinstance(meaning, SeveralFlags):
        return [f"{flag_name(field)}={read}" for field, read in meaning.read(value).items()]
    value = meaning.read(value)
    return [value] if meaning.field == "model" else [f"{flag_name(meaning.field)}={value}"]


def read_file(path: Path) -> dict[str, Any]:
    """Return the values of a YAML file, by name.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, *BAD_JSON) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"{CONFIG} {path} cannot be read: {why}") from None


def file_flags(values: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yield the command line that values of a file stand for: names without hyphens, and values.

    Raises:
        ConfigError: a name is no flag.
    """
    for key, value in values.items():
        name = flag_name(key)
        if name == CONFIG or name not in (*own_flags(), *ALIASES, "--model"):
            near = suggestion(name, [*own_flags(), *ALIASES]).replace("--", "")
            raise ConfigError(f"{where}: {key} is not known{near}")
        yield from value_flags(name, value, f"{where}: {key}")


def parts_of(models: Any, where: str, parser: Parser | None) -> list[dict[str, Any]]:
    """Return the flags of each model of a file's list: names, or each with flags of its own.

    Raises:
        ConfigError: it is no such list, or a flag of one is the server's.
    """
    if not isinstance(models, list) or not all(isinstance(one, str | dict) for one in models):
        raise ConfigError(f"{where} is a list of models, each a name, or its flags with its name")
    found = []
    for place, one in enumerate(models):
        flags = {"model": one} if isinstance(one, str) else one
        part = parse(list(file_flags(flags, f"{where}[{place}]")), parser)
        part["model"] = part["model"][0] if part.get("model") else None
        for name in part.keys() - OF_MODEL:
            raise ConfigError(
                f"{where}[{place}]: {name} is a flag of the server; give it beside {MODELS}"
            )
        found.append(part)
    return found


def value_flags(name: str, value: Any, where: str) -> Iterator[str]:
    """Yield a flag with a value of a file, or each of a list of them."""
    match value:
        case True:
            yield name
        case False:
            yield name.replace("--", "--no-", 1)
        case list():
            for item in value:
                yield from value_flags(name, item, where)
        case dict():
            yield f"{name}={msgspec.json.encode(value).decode()}"
        case str() | int() | float():
            yield f"{name}={value}"
        case _:
            raise ConfigError(f"{where} has no value")
