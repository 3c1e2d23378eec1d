"""`headrace kv`: lists, verifies and prunes the files of `--kv-store`."""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from headrace.config.flags import Parser, whole
from headrace.errors import ConfigError, end_command
from headrace.storage.slot_file import SlotFileReader
from headrace.storage.store_directory import (
    PAGES,
    STATES,
    is_locked,
    open_reader,
    slot_files,
)

DAY_NS = 86_400 * 10**9


class StoredFile(NamedTuple):
    """A file of a store, and whether a server writes it."""

    path: Path
    reader: SlotFileReader
    is_in_use: bool

    @property
    def row(self) -> dict[str, object]:
        """The row of a list."""
        header, used_ns = self.reader.header, self.reader.used_ns
        used_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(used_ns / 1e9)) if used_ns else ""
        return {
            "file": f"{self.path.parent.name}/{self.path.name}",
            "model": header.model,
            "kind": header.kind,
            "records": len(self.reader),
            "bytes": len(self.reader) * header.record_bytes,
            "room": header.num_bytes,
            "used_at": used_at,
            "in_use": self.is_in_use,
        }


def stored_files(root: Path) -> Iterator[StoredFile]:
    """Yield the files of a directory that can be read."""
    for path in slot_files(root):
        reader = open_reader(path)
        if reader is None:
            print(f"{path}: no file of a KV store; remove it", file=sys.stderr)
            continue
        number = path.with_name(path.name.replace(STATES, PAGES))  # whose lock is for both
        fd = os.open(number if number.exists() else path, os.O_RDWR | os.O_CLOEXEC)
        yield StoredFile(path, reader, is_locked(fd))
        os.close(fd)


def list_files(root: Path, is_json: bool) -> None:
    """Print what each file holds."""
    rows = [one.row for one in stored_files(root)]
    if is_json:
        print(json.dumps(rows))
        return
    for row in rows:
        state = "in use" if row["in_use"] else f"used {row['used_at']}"
        print(
            f"{row['file']}  {row['model']}: {row['records']} {row['kind']}, {row['bytes']} of "
            f"{row['room']} bytes, {state}"
        )


def verify(root: Path) -> int:
    """Read every record; return how many are damaged."""
    num_records = num_damaged = 0
    for one in stored_files(root):
        into = memoryview(bytearray(one.reader.header.record_bytes))
        for digest in one.reader:
            num_records += 1
            one.reader.read(digest, into)
        num_damaged += one.reader.num_refused
    print(f"{num_records} records, {num_damaged} damaged")
    return num_damaged


def prune(root: Path, unused_days: int) -> None:
    """Remove the files that no server writes and that were not used for so many days."""
    since_ns = time.time_ns() - unused_days * DAY_NS
    for one in list(stored_files(root)):
        if not one.is_in_use and one.reader.used_ns <= since_ns:
            one.path.unlink(missing_ok=True)
            print(f"removed {one.path}")
    for folder in {path.parent for path in root.glob("*/")}:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = Parser(prog="headrace kv", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="what each file holds")
    listing.add_argument("--json", action="store_true", help="as JSON")
    pruning = commands.add_parser("prune", help="remove files that no server writes")
    pruning.add_argument("--unused-days", type=whole, default=30, help="not used so long (30)")
    pruning.add_argument("--all", action="store_true", help="whenever they were used")
    checking = commands.add_parser("verify", help="read all; exit with 1 if a record is damaged")
    for command in (listing, pruning, checking):
        command.add_argument("folder", metavar="DIR", type=Path, help="of --kv-store")
    return parser


def main(argv: Sequence[str]) -> None:
    """Run the command; `verify` exits with 1 if a record is damaged."""
    try:
        args = make_parser().parse_args(argv)
        if not args.folder.is_dir():
            raise ConfigError(f"{args.folder} is no folder; name that of --kv-store")
    except ConfigError as error:
        end_command("headrace kv", error)
    match args.command:
        case "list":
            list_files(args.folder, args.json)
        case "prune":
            prune(args.folder, 0 if args.all else args.unused_days)
        case _:
            if verify(args.folder):
                sys.exit(1)
