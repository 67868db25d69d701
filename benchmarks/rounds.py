"""What the benchmarks share: each engine in a process of its own, taking turns."""

from __future__ import annotations

import multiprocessing
import os
import platform
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers

import paged_backend


def versions() -> str:
    """What a figure depends on besides the engines."""
    return (
        f"paged-backend {paged_backend.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}, "
        f"{torch.get_num_threads()} threads of {os.cpu_count()} cores"
    )


def start(serve: Callable[..., None], *arguments: Any) -> Connection:
    """The near end of a new process that runs `serve(far end, *arguments)`, once that has sent "ready".

    It answers each task that it is sent until it is sent None.
    """
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    context.Process(target=serve, args=(far, *arguments), daemon=True).start()
    far.close()
    assert near.recv() == "ready"
    return near


def take_turns(engines: Mapping[str, Connection], rounds: int, task: Callable[[int], Any]) -> dict[str, list[Any]]:
    """The answers of each engine, one per round, to `task(round)`. The order changes from round to round: who comes
    first is slower by 1 %."""
    answers: dict[str, list[Any]] = {name: [] for name in engines}
    for round_ in range(1, rounds + 1):
        for name, engine in list(engines.items())[:: 1 if round_ % 2 else -1]:
            engine.send(task(round_))
            answers[name].append(engine.recv())
    return answers
