"""What a load has shown, in numbers and in a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from paged_backend import MissingExtraError
from paged_backend.cli.bench_load import Answer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PERCENTILES = (50, 90, 99)
_TITLES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}


def results_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """Throughput over the whole run, and latencies in milliseconds; under the names of vLLM's `bench serve`."""
    good = [answer for answer in answers if answer.error is None]
    seconds = max((answer.end for answer in answers), default=0.0) - min((a.start for a in answers), default=0.0)
    num_input = sum(answer.num_prompt_tokens for answer in good)
    num_output = sum(answer.num_output_tokens for answer in good)
    results: dict[str, Any] = {
        "completed": len(good),
        "failed": len(answers) - len(good),
        "duration": seconds,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": _rate(len(good), seconds),
        "output_throughput": _rate(num_output, seconds),
        "total_token_throughput": _rate(num_input + num_output, seconds),
    }
    for name, values in latencies_of(good).items():
        results |= {f"{key}_{name}_ms": value for key, value in _summary(values).items()}
    results["errors"] = sorted({answer.error for answer in answers if answer.error is not None})
    return results


def latencies_of(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """In milliseconds. Between tokens means between pieces, of which each has one token unless the server is faster
    than its reader."""
    seconds = {
        "ttft": [answer.seconds_to_first for answer in answers if answer.seconds_to_first is not None],
        "tpot": [
            (answer.times[-1] - answer.times[0]) / (answer.num_output_tokens - 1)
            for answer in answers
            if answer.num_output_tokens > 1
        ],
        "itl": [gap for answer in answers for gap in answer.gaps],
        "e2el": [answer.end - answer.start for answer in answers],
    }
    return {name: [1000 * value for value in values] for name, values in seconds.items()}


def percentile(values: Sequence[float], share: float) -> float:
    """With a share of 50, the median; between two values, in proportion."""
    ranked = sorted(values)
    position = share / 100 * (len(ranked) - 1)
    low = int(position)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (position - low)


def tables_of(results: dict[str, Any]) -> list[Table]:
    totals = Table(show_header=False)
    for title, name, form in (
        ("Requests completed", "completed", "d"),
        ("Requests failed", "failed", "d"),
        ("Duration (s)", "duration", ".2f"),
        ("Input tokens", "total_input_tokens", "d"),
        ("Output tokens", "total_output_tokens", "d"),
        ("Requests per second", "request_throughput", ".2f"),
        ("Output tokens per second", "output_throughput", ".1f"),
        ("Tokens per second", "total_token_throughput", ".1f"),
    ):
        totals.add_row(title, format(results[name], form))
    latencies = Table("ms", "mean", *(f"P{share}" for share in PERCENTILES))
    for name, title in _TITLES.items():
        keys = [f"{key}_{name}_ms" for key in ("mean", *(f"p{share}" for share in PERCENTILES))]
        latencies.add_row(title, *("-" if results[key] is None else f"{results[key]:.1f}" for key in keys))
    return [totals, latencies]


def load_figure() -> type[Figure]:
    """What plots are drawn on. Raises MissingExtraError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("--plot", "plot") from error
    return Figure


def plot(answers: Sequence[Answer], path: Path) -> None:
    """The distribution of both latencies, and tokens per second over time. Raises MissingExtraError."""
    good = [answer for answer in answers if answer.error is None]
    latencies = latencies_of(good)
    figure = load_figure()(figsize=(12, 4), layout="constrained")
    first, between, rate = figure.subplots(1, 3)
    for axes, name in ((first, "ttft"), (between, "itl")):
        values = sorted(latencies[name])
        axes.plot(values, [100 * (index + 1) / len(values) for index in range(len(values))])
        axes.set(title=_TITLES[name], xlabel="ms", ylabel="% of all", ylim=(0, 100))
    seconds, tokens = rate_over_time(good)
    rate.step(seconds, tokens, where="mid")
    rate.set(title="Output", xlabel="s", ylabel="tokens/s", ylim=(0, None))
    for axes in (first, between, rate):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def rate_over_time(answers: Sequence[Answer], num_bins: int = 50) -> tuple[list[float], list[float]]:
    """Middles of equal parts of the time, and output tokens per second in each; the tokens of an answer count where
    its pieces came."""
    end = max((answer.end for answer in answers), default=0.0)
    width = max(end / num_bins, 1e-9)
    tokens = [0.0] * num_bins
    for answer in answers:
        for time in answer.times:
            tokens[min(int(time / width), num_bins - 1)] += answer.num_output_tokens / len(answer.times)
    return [(index + 0.5) * width for index in range(num_bins)], [number / width for number in tokens]


def _rate(number: int, seconds: float) -> float:
    return number / seconds if seconds else 0.0


def _summary(values: Sequence[float]) -> dict[str, float | None]:
    names = ("mean", "std", *(f"p{share}" for share in PERCENTILES))
    if not values:
        return dict.fromkeys(names)
    numbers = (statistics.fmean(values), statistics.pstdev(values), *(percentile(values, p) for p in PERCENTILES))
    return dict(zip(names, numbers, strict=True))
