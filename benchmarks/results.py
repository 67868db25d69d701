"""What `compare.py` has measured: rates of runs, kept in one JSON file; tables and a plot drawn from it.

A run is the rates of engines that took turns: `{"date", "machine", "threads", "model", "engines": {name: what it said
of itself}, "rates": {workload: {name: [one per round]}}}`. Rates of one run can be divided by one another, those of
different runs cannot.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from workloads import WORKLOADS

Run = dict[str, Any]
EIGHT_BITS = ("int8", "q8_0")


def load_runs(path: Path) -> list[Run]:
    """Oldest first; none if there is no such file."""
    return json.loads(path.read_text())["runs"] if path.exists() else []


def save_runs(path: Path, runs: list[Run]) -> None:
    path.write_text(json.dumps({"runs": runs}, indent=1) + "\n")


def merged(runs: list[Run], new: Run) -> list[Run]:
    """`runs` and a newer one, less what it has measured again with all the engines that took part."""
    kept = []
    for run in runs:
        rates = {
            workload: by_engine
            for workload, by_engine in run["rates"].items()
            if not by_engine.keys() <= new["rates"].get(workload, {}).keys()
        }
        if rates:
            kept.append({**run, "rates": rates})
    return [*kept, new]


def rates_of(runs: list[Run], workload: str, *engines: str) -> list[list[float]] | None:
    """The rates of these engines in the newest run that has measured all of them."""
    for run in reversed(runs):
        by_engine = run["rates"].get(workload, {})
        if all(engine in by_engine for engine in engines):
            return [by_engine[engine] for engine in engines]
    return None


def ratio(runs: list[Run], workload: str, ours: str, theirs: str) -> float | None:
    """The median, over the rounds of one run, of our rate by theirs."""
    pair = rates_of(runs, workload, ours, theirs)
    return pair and statistics.median(a / b for a, b in zip(*pair, strict=True))


def opponent_of(engine: str) -> str:
    """Ours at as many bits."""
    return "paged:int8" if engine.partition(":")[2] in EIGHT_BITS else "paged:bf16"


def measured(runs: list[Run]) -> tuple[list[str], list[str]]:
    """Workloads as workloads.py orders them, and engines as they were first measured, ours first."""
    workloads = {workload for run in runs for workload in run["rates"]}
    engines = dict.fromkeys(engine for run in runs for by_engine in run["rates"].values() for engine in by_engine)
    return sorted(workloads, key=list(WORKLOADS).index), sorted(
        engines, key=lambda engine: not engine.startswith("paged")
    )


def overview(runs: list[Run]) -> str:
    """A markdown table: medians, and behind those of others how many times as fast ours is at as many bits."""
    workloads, engines = measured(runs)
    rows = [["tokens/s", *workloads]]
    for engine in engines:
        rows.append([engine, *(_cell(runs, workload, engine) for workload in workloads)])
    return markdown(rows)


def _cell(runs: list[Run], workload: str, engine: str) -> str:
    rates = rates_of(runs, workload, engine)
    if rates is None:
        return "–"
    median = f"{statistics.median(rates[0]):.0f}"
    if engine.startswith("paged"):
        return f"**{median}**"
    factor = ratio(runs, workload, opponent_of(engine), engine)
    return median if factor is None else f"{median} ({factor:.2f}×)"


def details(runs: list[Run]) -> str:
    """A markdown table with a line for each engine and workload."""
    rows = [["workload", "engine", "version", "median", "slowest", "fastest", "rounds", "bf16 ours", "int8 ours"]]
    workloads, engines = measured(runs)
    for workload in workloads:
        for engine in engines:
            rates = rates_of(runs, workload, engine)
            if rates is None:
                continue
            figures = (statistics.median(rates[0]), min(rates[0]), max(rates[0]))
            factors = [ratio(runs, workload, ours, engine) for ours in ("paged:bf16", "paged:int8")]
            rows.append(
                [
                    *(workload, engine, _version(runs, engine)),
                    *(f"{figure:.1f}" for figure in figures),
                    str(len(rates[0])),
                    *("–" if factor is None else f"{factor:.2f}×" for factor in factors),
                ]
            )
    return markdown(rows)


def _version(runs: list[Run], engine: str) -> str:
    return next(run["engines"][engine]["version"] for run in reversed(runs) if engine in run["engines"])


def markdown(rows: Iterable[list[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def settings(runs: list[Run]) -> str:
    """A markdown list: where it was measured, what each engine was, and was told."""
    newest = {engine: said for run in runs for engine, said in run["engines"].items()}
    places = dict.fromkeys(f"- {run['machine']}; {run['threads']} threads; model {run['model']}" for run in runs)
    engines = [
        f"- `{engine}`: {said['package']} {said['version']}; "
        + ", ".join(f"{name} {value}" for name, value in said["settings"].items())
        for engine, said in newest.items()
    ]
    return "\n".join([*places, *engines])


def plot(runs: list[Run], path: Path) -> None:
    """One panel for each workload, a bar for each engine, ours dark."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot

    matplotlib.rcParams |= {"svg.hashsalt": "paged-backend", "font.size": 8, "svg.fonttype": "none"}
    workloads, engines = measured(runs)
    columns = min(4, len(workloads))
    lines = -(-len(workloads) // columns)
    size = (2.6 * columns, lines * (0.6 + 0.2 * len(engines)))
    figure, axes = matplotlib.pyplot.subplots(lines, columns, figsize=size, squeeze=False, sharey=True)
    for axis in axes.flat[len(workloads) :]:
        axis.set_axis_off()
    for workload, axis in zip(workloads, axes.flat, strict=False):
        rates = [rates_of(runs, workload, engine) for engine in engines]
        medians = [statistics.median(values[0]) if values else 0 for values in rates]
        colours = ["#1f4e79" if engine.startswith("paged") else "#b8c4d0" for engine in engines]
        bars = axis.barh(engines, medians, color=colours)
        axis.bar_label(bars, labels=[f"{median:.0f}" if median else "" for median in medians], padding=2)
        axis.set_title(workload)
        axis.set_xlim(0, 1.2 * max(medians))
        axis.xaxis.set_visible(False)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    axes[0][0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    matplotlib.pyplot.close(figure)
