"""The benchmark against other engines: what it asks of them, and what it makes of their answers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import compare
import results
from engines import SCRIPTS, EngineProcess, engine_names
from workloads import WORKLOADS, Workload

# Answers at once with the tokens it was asked for, or with one less where it is told to be short.
FAKE = """
import json
from pathlib import Path

import protocol


def convert(model, precision, converted):
    with open(converted.parent / "conversions", "a") as file:
        file.write(precision + " ")
    converted.write_text(model.read_text() + precision)


def load(model, precision, threads, options):
    def generate(conversations, num_tokens):
        print("a line of the engine's own")
        num_prompt_tokens = sum(len(c[-1]["content"].split()) for c in conversations)
        return num_prompt_tokens, len(conversations) * num_tokens - options.get("short", 0)

    return protocol.Engine(generate, {"loaded": model.read_text(), "threads": threads})


protocol.serve("pytest", load, convert)
"""

StartFake = Callable[..., EngineProcess]


@pytest.fixture
def start_fake(tmp_path: Path) -> Iterator[StartFake]:
    (tmp_path / "fake_peer.py").write_text(FAKE)
    (tmp_path / "model").write_text("weights in ")
    running: list[EngineProcess] = []

    def start(options: str = "{}", script: str = "fake_peer.py") -> EngineProcess:
        command = [sys.executable, str(tmp_path / script), "--model", str(tmp_path / "model"), "--precision", "bf16"]
        command += ["--converted", str(tmp_path / "converted" / "model"), "--threads", "2", "--options", options]
        running.append(EngineProcess(command, {**os.environ, "PYTHONPATH": str(SCRIPTS)}))
        return running[-1]

    yield start
    for engine in running:
        engine.close()


class Timed:
    """An engine that reads 600 tokens a conversation, and says of each task that it took the next of these seconds."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = list(seconds)

    def send(self, task: dict[str, Any]) -> None:
        self._num_conversations, self._num_tokens = len(task["conversations"]), task["num_tokens"]

    def recv(self) -> dict[str, Any]:
        return {
            "seconds": self._seconds.pop(0),
            "num_prompt_tokens": 600 * self._num_conversations,
            "num_output_tokens": self._num_tokens * self._num_conversations,
        }


def run_of(rates: dict[str, dict[str, list[float]]], version: str = "1.0") -> results.Run:
    names = {name for by_engine in rates.values() for name in by_engine}
    said = {"package": "some-package", "version": version, "settings": {"threads": 2}}
    return {
        "date": "",
        "machine": "",
        "threads": 2,
        "model": "demo",
        "engines": dict.fromkeys(names, said),
        "rates": rates,
    }


def cells(table: str) -> dict[str, list[str]]:
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return {line[0]: line[1:] for line in lines}


def test_an_engine_says_what_it_is_and_then_counts_and_times_each_task(start_fake: StartFake) -> None:
    engine = start_fake()
    assert engine.ready["package"] == "pytest" and engine.ready["version"] == pytest.__version__
    for num_tokens in (3, 5):
        engine.send({"conversations": [[{"role": "user", "content": "two words"}]] * 4, "num_tokens": num_tokens})
        answer = engine.recv()
        assert answer.pop("seconds") > 0
        assert answer == {"num_prompt_tokens": 8, "num_output_tokens": 4 * num_tokens}


def test_a_model_is_converted_once(start_fake: StartFake, tmp_path: Path) -> None:
    for engine in (start_fake(), start_fake()):
        assert engine.ready["settings"]["loaded"] == "weights in bf16"
    assert (tmp_path / "converted" / "conversions").read_text() == "bf16 "


def test_an_engine_that_ends_is_an_error_with_its_exit_status(start_fake: StartFake, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match=r"broken\.py.*exit status 3"):
        start_fake(script="broken.py")


def test_rates_are_output_tokens_by_seconds_or_prompt_tokens_where_one_is_written() -> None:
    writing, reading = Workload("writing", 2, num_tokens=50), Workload("reading", 2, num_tokens=1)
    assert compare.measure({"paged:bf16": Timed(2.0, 4.0)}, writing, rounds=2) == {"paged:bf16": [50.0, 25.0]}
    assert compare.measure({"paged:bf16": Timed(2.0, 4.0)}, reading, rounds=2) == {"paged:bf16": [600.0, 300.0]}


def test_an_engine_that_writes_less_than_it_was_asked_for_is_not_measured(start_fake: StartFake) -> None:
    with pytest.raises(AssertionError, match="num_output_tokens"):
        compare.measure({"paged:bf16": start_fake('{"short": 1}')}, WORKLOADS["b8"], rounds=1)


def test_prompts_are_new_in_each_round_unless_only_decoding_counts() -> None:
    for workload in WORKLOADS.values():
        first, second = workload.conversations(1), workload.conversations(2)
        assert (first == second) == workload.is_decode_only
        assert len({str(conversation) for conversation in first}) == workload.num_conversations


def test_engines_without_a_prefix_cache_are_left_out_where_only_decoding_counts() -> None:
    engines: dict[str, Any] = dict.fromkeys(["paged:bf16", "generate:bf16"])
    assert list(compare.able(engines, WORKLOADS["decode4k"])) == ["paged:bf16"]
    assert list(compare.able(engines, WORKLOADS["b8"])) == ["paged:bf16", "generate:bf16"]


def test_an_engine_without_a_precision_stands_for_all_of_its() -> None:
    assert engine_names(["llama.cpp", "paged:int8"]) == ["llama.cpp:bf16", "llama.cpp:q8_0", "paged:int8"]


def test_newer_rates_replace_older_ones_of_the_same_engines_and_workload() -> None:
    old = run_of({"b1": {"paged:bf16": [1], "vllm:bf16": [1]}, "b8": {"paged:bf16": [5]}})
    runs = results.merged([old], run_of({"b1": {"paged:bf16": [2], "vllm:bf16": [1], "openvino:int8": [4]}}))
    assert [run["rates"].keys() for run in runs] == [{"b8"}, {"b1"}]
    assert results.rates_of(runs, "b1", "paged:bf16") == [[2]]


def test_a_ratio_is_the_median_over_the_rounds_of_the_newest_run_with_both() -> None:
    together = run_of({"b1": {"paged:bf16": [10, 60, 30], "vllm:bf16": [10, 10, 10]}})
    alone = run_of({"b1": {"paged:bf16": [1000]}})
    runs = results.merged([together], alone)
    assert results.ratio(runs, "b1", "paged:bf16", "vllm:bf16") == 3
    assert results.ratio(runs, "b1", "paged:bf16", "openvino:fp16") is None


def test_the_overview_compares_each_engine_with_ours_at_as_many_bits() -> None:
    rates = {"paged:bf16": [100.0], "paged:int8": [200.0], "openvino:fp16": [80.0], "llama.cpp:q8_0": [50.0]}
    table = cells(results.overview([run_of({"b1": rates, "b8": {"openvino:fp16": [7.0]}})]))
    assert table["openvino:fp16"] == ["80 (1.25×)", "7"]
    assert table["llama.cpp:q8_0"] == ["50 (4.00×)", "–"]
    assert table["paged:int8"] == ["**200**", "–"]


def test_what_was_measured_lies_in_one_file_and_is_drawn_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert results.load_runs(path) == []
    run = run_of({"b1": {"paged:bf16": [3.0, 1.0, 2.0], "vllm:bf16": [1.0, 1.0, 1.0]}}, version="9.8")
    results.save_runs(path, [run])
    assert results.load_runs(path) == [run]
    compare.draw(path, [run])
    drawn = path.with_suffix(".md").read_text()
    assert "| b1 | paged:bf16 | 9.8 | 2.0 | 1.0 | 3.0 | 3 |" in drawn and "threads 2" in drawn
    assert "paged:bf16" in path.with_suffix(".svg").read_text()
