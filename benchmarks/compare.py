"""Tokens per second of this engine and of others, on the same work, in turns.

    python benchmarks/compare.py --engines paged:bf16 paged:int8 llama.cpp openvino --output results.json

Each engine has a virtual environment of its own, since their requirements exclude one another: it is made below
`--environments` at first use, which takes minutes (llama.cpp is compiled), or taken from there. The model is converted
for those that need it. Each runs in a process of its own with as many threads as there are cores, warms up, and takes
its turn in each round, so that whatever else the machine does hits all of them alike; what counts are the ratios. Run
it on a quiet machine.

Rates are output tokens by the time of the whole workload, prompts included; of `prefill4k`, prompt tokens. `--output`
adds the rates to those in the file, where newer ones of the same engines and workloads replace older ones, and draws
tables and a plot of all of them beside it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import results
from engines import ENVIRONMENTS, PEERS, EngineProcess, Setup, available_threads, engine_names, start
from rounds import Engine, machine, take_turns
from workloads import WORKLOADS, Workload

DEFAULT_WORKLOADS = ("b1", "b8", "b32", "b64", "shared32")


def task(workload: Workload, round_: int, num_tokens: int | None = None) -> dict[str, Any]:
    return {"conversations": workload.conversations(round_), "num_tokens": num_tokens or workload.num_tokens}


def able(engines: Mapping[str, Engine], workload: Workload) -> dict[str, Engine]:
    """Those for which the workload measures what it is meant to."""
    return {
        name: engine
        for name, engine in engines.items()
        if PEERS[name.partition(":")[0]].has_prefix_cache or not workload.is_decode_only
    }


def warm_up(engines: Mapping[str, Engine], workload: Workload) -> None:
    """Round 0, answered with two tokens: shapes are known and buffers made, and prompts of round 0 are cached."""
    num_prompt_tokens = {}
    for name, engine in able(engines, workload).items():
        engine.send(task(workload, 0, 2))
        num_prompt_tokens[name] = engine.recv()["num_prompt_tokens"]
    if len(set(num_prompt_tokens.values())) > 1:
        print(f"{workload.name}: they do not read the same prompts: {num_prompt_tokens} tokens", flush=True)


def measure(engines: Mapping[str, Engine], workload: Workload, rounds: int) -> dict[str, list[float]]:
    """Rates of each engine, one per round."""
    answers = take_turns(able(engines, workload), rounds, lambda round_: task(workload, round_))
    rates = {name: [_rate(workload, answer) for answer in values] for name, values in answers.items()}
    for name, values in rates.items():
        print(
            f"{workload.name:9} {name:20} median {statistics.median(values):7.1f} tokens/s, "
            f"slowest {min(values):7.1f}, fastest {max(values):7.1f}",
            flush=True,
        )
    return rates


def _rate(workload: Workload, answer: dict[str, Any]) -> float:
    assert answer["num_output_tokens"] == workload.num_conversations * workload.num_tokens, answer
    counted = "num_prompt_tokens" if workload.counts_prompts else "num_output_tokens"
    return round(answer[counted] / answer["seconds"], 2)


def draw(path: Path, runs: list[results.Run]) -> None:
    title = '# Rates by engine and workload\n\nDrawn by `benchmarks/compare.py`; "ours": how many times as fast.'
    tables = [title, results.overview(runs), results.details(runs), results.settings(runs)]
    path.with_suffix(".md").write_text("\n\n".join(tables) + "\n")
    results.plot(runs, path.with_suffix(".svg"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for peer in PEERS for name in (peer, *engine_names([peer]))]
    parser.add_argument(
        "--engines", nargs="+", default=["paged:bf16", "generate:bf16"], choices=names, metavar="ENGINE",
        help=f"one of {', '.join(engine_names(list(PEERS)))}, or without precision: all of its",
    )  # fmt: skip
    parser.add_argument("--workloads", nargs="+", default=list(DEFAULT_WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="demo", help="demo, or a folder with a transformers checkpoint")
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp, which converts it to the precision")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS)
    parser.add_argument("--threads", type=int, default=available_threads())
    parser.add_argument("--paged-options", type=json.loads, default={}, help="JSON of EngineConfig fields for ours")
    parser.add_argument(
        "--output", type=Path, help="the JSON file that collects rates; .md and .svg are drawn beside it"
    )
    arguments = parser.parse_args()

    setup = Setup(
        arguments.model, arguments.environments.absolute(), arguments.threads, arguments.gguf, arguments.paged_options
    )
    engines: dict[str, EngineProcess] = {}
    try:
        for name in engine_names(arguments.engines):
            engines[name] = start(name, setup)
            print(f"loaded: {name} {engines[name].ready}", flush=True)
        run = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "threads": arguments.threads,
            "model": arguments.model,
            "engines": {name: engine.ready for name, engine in engines.items()},
        }
        for name in arguments.workloads:
            warm_up(engines, WORKLOADS[name])
            rates = measure(engines, WORKLOADS[name], arguments.rounds)
            if arguments.output:
                runs = results.merged(results.load_runs(arguments.output), {**run, "rates": {name: rates}})
                results.save_runs(arguments.output, runs)
                draw(arguments.output, runs)
    finally:
        for engine in engines.values():
            engine.close()


if __name__ == "__main__":
    main()
