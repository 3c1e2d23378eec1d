"""`headrace bench`: load on a server with an OpenAI-compatible API, or on an engine."""

import pkgutil

from headrace.errors import ConfigError, end_command

COMMANDS = {
    "serve": "headrace.bench.serve:main",
    "stream": "headrace.bench.stream:main",
    "latency": "headrace.bench.latency:main",
    "throughput": "headrace.bench.throughput:main",
}
USAGE = f"usage: headrace bench {{{','.join(COMMANDS)}}} …, or with --help after one"


def main(argv: list[str]) -> None:
    """Run the benchmark named first; only its code is loaded."""
    name, *rest = argv or ["--help"]
    if name in COMMANDS:
        pkgutil.resolve_name(COMMANDS[name])(rest)
    elif name in ("-h", "--help"):
        print(USAGE)
    else:
        why = f"no benchmark '{name}': {', '.join(COMMANDS)}"
        end_command("headrace bench", ConfigError(why))
