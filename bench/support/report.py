"""The output of every benchmark: a table, a line of JSON, a file and a plot.

A benchmark measures several quantities on several systems, in rounds that alternate between the
systems. All samples are kept, one per round; a quantity's figure is their median.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
PACKAGES = ("headrace", "numpy", "torch")
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16")


@dataclass(frozen=True)
class Quantity:
    """One row of the table. With two systems, `ratio` is above 1 where the first is better."""

    name: str
    unit: str
    samples: dict[str, list[float]]  # by system, one per round
    higher_is_better: bool = False
    commit: str | None = None  # of the code that was measured, where the file's is another

    @property
    def medians(self) -> dict[str, float]:
        """The figure of each system that has one."""
        return {system: statistics.median(all) for system, all in self.samples.items() if all}

    def ratio(self, first: float, second: float) -> float:
        """Return how many times better `first` is; 0 where one of them is 0."""
        better, worse = (first, second) if self.higher_is_better else (second, first)
        return better / worse if worse else 0.0

    @property
    def ratios(self) -> tuple[float, float, float] | None:
        """The ratio of medians, then the worst and the best round's; None without two systems."""
        systems = list(self.medians)
        if len(systems) != 2:
            return None
        first, second = (self.samples[system] for system in systems)
        rounds = [self.ratio(a, b) for a, b in zip(first, second, strict=False)]
        return self.ratio(*self.medians.values()), min(rounds), max(rounds)

    def as_json(self) -> dict[str, Any]:
        """Return the row with its samples."""
        fields: dict[str, Any] = {"quantity": self.name, "unit": self.unit}
        fields["higher_is_better"] = self.higher_is_better
        fields["medians"] = {system: significant(value) for system, value in self.medians.items()}
        if self.ratios is not None:
            ratio, worst, best = (significant(value) for value in self.ratios)
            fields |= {"ratio": ratio, "worst_round": worst, "best_round": best}
        if self.commit is not None:
            fields["commit"] = self.commit
        samples = {system: [significant(v) for v in all] for system, all in self.samples.items()}
        return fields | {"samples": samples}

    @classmethod
    def from_json(cls, row: dict[str, Any], commit: str | None) -> "Quantity":
        """Return the row that `as_json` gave, measured with the code of `commit`."""
        is_higher = row.get("higher_is_better")
        if is_higher is None:
            raise SystemExit(
                f"--add: the saved run is older and does not say which way {row['quantity']} is "
                "better; save without --add"
            )
        return cls(row["quantity"], row["unit"], row["samples"], is_higher, commit)


class Report:
    """Result of one run of one benchmark."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        """Begin: `name` is that of the script, `options` are recorded."""
        self.name = name
        self.quantities: list[Quantity] = []
        self.missing: list[str] = []
        self.versions = {"python": platform.python_version(), **installed(PACKAGES)}
        self._options = options
        recorded = {k: v for k, v in vars(options).items() if k not in ("save", "add")}
        self.options = {key: value for key, value in recorded.items() if not is_path(value)}
        self._load = os.getloadavg()[0]
        self.commit = commit()
        self._date = datetime.datetime.now(datetime.UTC)

    def add(self, quantity: Quantity) -> None:
        """Add a row."""
        self.quantities.append(quantity)

    def miss(self, what: str) -> None:
        """Record a measurement that was not possible, with the reason."""
        self.missing.append(what)
        print(f"not measured: {what}", flush=True)

    def finish(self) -> None:
        """Print the table and the line of JSON; with `--save`, write both files."""
        if self.quantities:
            print(self.table())
        result = self.as_json()
        if self._options.save is not None and self.quantities:
            RESULTS.mkdir(exist_ok=True)
            path = RESULTS / f"{'-'.join([self.name, *self._options.save])}.json"
            if self._options.add and path.exists():
                self.add_to(json.loads(path.read_text()))
                result = self.as_json()
            path.write_text(json.dumps(result, indent=1) + "\n")
            draw(self, path.with_suffix(".svg"))
            print(f"saved {path.relative_to(ROOT)} and {path.stem}.svg")
        for row in result["quantities"]:
            del row["samples"]
        print(json.dumps(result))

    def add_to(self, saved: dict[str, Any]) -> None:
        """Put the rows of a saved run before these; a row of the same name is replaced.

        Rows keep the commit that they were measured with. Hardware and peers must be the same.
        """
        new = self.as_json()
        for what in ("hardware", "versions"):
            before, now = ({**run[what], "headrace": None} for run in (saved, new))
            if before != now:
                raise SystemExit(
                    f"--add: the saved run has {what} {saved[what]}, this one {new[what]}; "
                    "save without --add, under another name"
                )
        names = {quantity.name for quantity in self.quantities}
        kept = [row for row in saved["quantities"] if row["quantity"] not in names]
        commits = [row.get("commit", saved["commit"]) for row in kept]
        self.quantities[:0] = [
            Quantity.from_json(row, commit if commit != self.commit else None)
            for row, commit in zip(kept, commits, strict=True)
        ]
        self.missing[:0] = [what for what in saved["not_measured"] if what not in self.missing]
        self._load = max(self._load, saved["load_before"])
        for key, value in saved["options"].items():
            if isinstance(value, list):  # such as models
                self.options[key] = list(dict.fromkeys([*value, *self.options.get(key, ())]))

    def as_json(self) -> dict[str, Any]:
        """Return everything, for the file."""
        return {
            "benchmark": self.name,
            "date": self._date.isoformat(timespec="seconds"),
            "commit": self.commit,
            "hardware": hardware(),
            "load_before": round(self._load, 2),
            "versions": self.versions,
            "options": self.options,
            "not_measured": self.missing,
            "quantities": [quantity.as_json() for quantity in self.quantities],
        }

    def table(self) -> str:
        """Return the table as text: a column per system, then the ratio of a row's two."""
        systems = list(dict.fromkeys(s for q in self.quantities for s in q.samples))
        rows = [["", "", *systems, "ratio", "rounds"]]
        for quantity in self.quantities:
            medians = quantity.medians
            figures = [f"{medians[s]:,.4g}" if s in medians else "" for s in systems]
            if quantity.ratios is None:
                ratios = ["", ""]
            else:
                ratio, worst, best = quantity.ratios
                ratios = [f"{ratio:.2f}", f"{worst:.2f} to {best:.2f}"]
            rows.append([quantity.name, quantity.unit, *figures, *ratios])
        if all(quantity.ratios is None for quantity in self.quantities):
            rows = [row[:-2] for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            name, unit, *figures = (cell.ljust(w) for cell, w in zip(row, widths, strict=True))
            right = [f.strip().rjust(w) for f, w in zip(figures, widths[2:], strict=True)]
            lines.append("  ".join([name, unit, *right]).rstrip())
        return "\n".join(lines)


def parser(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    assert doc is not None
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds; figures are medians")
    parser.add_argument(
        "--save",
        nargs="*",
        metavar="MACHINE",
        help=f"write to {RESULTS.relative_to(ROOT)}, under a name that ends in the machine's",
    )
    parser.add_argument(
        "--add", action="store_true", help="with --save: to what an earlier run saved there"
    )
    return parser


def commit() -> str:
    """Return the checkout's short hash, with a + where files differ from it."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    dirty = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ":!bench/results"], check=False)
    return head.stdout.strip() + ("+" if dirty.returncode else "")


def hardware() -> dict[str, Any]:
    """Return what the figures depend on."""
    info = Path("/proc/cpuinfo").read_text()
    fields = dict(line.split(":", 1) for line in info.split("\n\n")[0].splitlines())
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    flags = set(fields.get("flags", "").split())
    return {
        "processor": fields.get("model name", platform.machine()),
        "family_model": f"{fields.get('cpu family')}/{fields.get('model')}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(total / 2**30, 1),
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in flags],
    }


def installed(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of those that are installed."""
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def peer_version(python: str | None, package: str) -> str | None:
    """Return a package's version in another environment, or None where it is not."""
    if python is None or not Path(python).exists():
        return None
    code = f"from importlib.metadata import version; print(version({package!r}))"
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return answer.stdout.strip() or None


def is_path(value: object) -> bool:
    """Whether an option is a path on this machine, which does not affect a figure."""
    return isinstance(value, str) and value.startswith("/")


def significant(value: float) -> float:
    """Round to four significant digits: samples are kept, and kept small."""
    return float(f"{value:.4g}")


def draw(report: Report, path: Path) -> None:
    """Plot medians as bars, with lines from the lowest to the highest round; a panel per unit."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = report.name
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: smaller files
    import matplotlib.pyplot as plt

    units = list(dict.fromkeys(quantity.unit for quantity in report.quantities))
    panels = [[q for q in report.quantities if q.unit == unit] for unit in units]
    systems = list(dict.fromkeys(s for q in report.quantities for s in q.samples))
    bars = [sum(len(quantity.medians) for quantity in panel) + 1 for panel in panels]
    figure, axes = plt.subplots(
        len(panels),
        squeeze=False,
        figsize=(8, 0.26 * sum(bars) + 0.7 * len(panels)),
        height_ratios=bars,
        layout="constrained",
    )
    for unit, panel, axis in zip(units, panels, axes[:, 0], strict=True):
        own = [system for system in systems if any(q.samples.get(system) for q in panel)]
        thickness = 0.8 / len(own)
        for number, system in enumerate(own):
            color = f"C{systems.index(system)}"
            rows = [(i, q) for i, q in enumerate(panel) if q.samples.get(system)]
            places = [i + thickness * (number + 0.5) - 0.4 for i, _ in rows]
            medians = [q.medians[system] for _, q in rows]
            below = [q.medians[system] - min(q.samples[system]) for _, q in rows]
            above = [max(q.samples[system]) - q.medians[system] for _, q in rows]
            bar = axis.barh(
                places, medians, thickness, xerr=[below, above], label=system, color=color
            )
            labels = [f" {value:,.4g}" for value in medians]
            axis.bar_label(bar, labels=labels, fontsize=7, label_type="edge", padding=3)
        axis.set_yticks(range(len(panel)), [quantity.name for quantity in panel], fontsize=8)
        axis.invert_yaxis()
        axis.set_xlabel(unit, fontsize=8)
        axis.tick_params(axis="x", labelsize=7)
        axis.margins(x=0.15, y=0.02)
        axis.spines[["top", "right"]].set_visible(False)
        if axis is axes[0, 0] or own != systems:
            axis.legend(fontsize=8, frameon=False)
    figure.suptitle(f"{report.name}, {report.commit}, {hardware()['processor']}", fontsize=9)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
