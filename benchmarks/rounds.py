"""What the benchmarks share: each engine in a process of its own, taking turns."""

from __future__ import annotations

import multiprocessing
import os
import platform
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

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


def machine() -> str:
    """The processor (on Linux, with the instructions that matter here), cores, system."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    fields = dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)
    flags = fields.get("flags", "").split()
    features = [flag for flag in ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx512f", "avx2") if flag in flags]
    name = " ".join([fields.get("model name", platform.processor()), *features])
    return f"{name}; {os.cpu_count()} cores; {platform.system()}; Python {platform.python_version()}"


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


class Engine(Protocol):
    """A Connection, or what is used like one."""

    def send(self, task: Any, /) -> None: ...

    def recv(self) -> Any: ...


def take_turns(engines: Mapping[str, Engine], rounds: int, task: Callable[[int], Any]) -> dict[str, list[Any]]:
    """The answers of each engine, one per round, to `task(round)`. The order changes from round to round: who comes
    first is slower by 1 %."""
    answers: dict[str, list[Any]] = {name: [] for name in engines}
    for round_ in range(1, rounds + 1):
        for name, engine in list(engines.items())[:: 1 if round_ % 2 else -1]:
            engine.send(task(round_))
            answers[name].append(engine.recv())
    return answers
