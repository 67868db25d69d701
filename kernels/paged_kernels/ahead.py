"""The first start on a machine: a second process compiles some of the kernels meanwhile, and leaves them on the disk.

It compiles what takes longest, the work on attention's items, and what is needed last, the draws. Whoever needs one of
these in the first process waits for it there; if the second process fails, it is compiled where it is needed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time

import torch

_ITEMS, _DRAWS = "attention items", "draws"
_LONGEST = 120.0  # seconds: after that something is wrong with the other process
_LOWER_PRIORITY = 10


class Helper:
    """The second process, and what it has told of: a line for each part that is done."""

    def __init__(self) -> None:
        self._told = threading.Condition()
        self._done: set[str] = set()
        self._is_running = False
        self._begin = 0.0

    def start(self, *arguments: str) -> None:
        """Python with these arguments. If it cannot be started, nobody waits for it."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        try:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                text=True,
            )
        except OSError:
            return
        self._is_running, self._begin = True, time.monotonic()
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()

    def wait_for(self, part: str) -> None:
        """Until the process has told of it, or has ended; at once if there is none."""
        with self._told:
            left = self._begin + _LONGEST - time.monotonic()
            self._told.wait_for(lambda: part in self._done or not self._is_running, timeout=max(0.0, left))

    def _listen(self, process: subprocess.Popen[str]) -> None:
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                with self._told:
                    self._done.add(line.strip())
                    self._told.notify_all()
        with self._told:
            self._is_running = False
            self._told.notify_all()


_helper = Helper()


def compile_beside(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Start the second process, for a model that computes in `dtype` and keeps keys and values as `cache_dtype`;
    where there is one core only, or no Python to start, all is compiled here."""
    if num_cores() > 1 and sys.executable and not getattr(sys, "frozen", False):
        names = (str(one).removeprefix("torch.") for one in (dtype, cache_dtype))
        _helper.start("-P", "-m", "paged_kernels.ahead", *names)


def wait_for_items() -> None:
    """Until another process has compiled what works on attention's items, if one is at it."""
    _helper.wait_for(_ITEMS)


def wait_for_draws() -> None:
    """Until another process has compiled the draws, if one is at it."""
    _helper.wait_for(_DRAWS)


def num_cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _compile(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """What the second process does."""
    from paged_kernels import cpu, sampling

    caches = torch.empty(0, 0, 0, 0, dtype=cache_dtype)
    cpu.item_kernels(torch.empty(0, 0, 0, dtype=dtype), caches)
    _tell(_ITEMS)
    _draw(dtype)
    _tell(_DRAWS)
    # What the first process does not wait for: rows that are changed before the draw are float32.
    with contextlib.suppress(AttributeError, OSError):
        os.nice(_LOWER_PRIORITY)
    _draw(torch.float32)
    for one in dict.fromkeys((dtype, torch.float32)):
        sampling.best_logits(torch.zeros(1, 1, dtype=one), torch.zeros(1, dtype=torch.int64), 1)


def _tell(part: str) -> None:
    sys.stdout.write(f"{part}\n")
    sys.stdout.flush()


def _draw(dtype: torch.dtype) -> None:
    from paged_kernels import sampling

    zero, one = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    sampling.draw(torch.zeros(1, 1, dtype=dtype), zero, zero, one, zero, zero)


if __name__ == "__main__":
    torch.set_num_threads(1)
    _compile(*(getattr(torch, name) for name in sys.argv[1:3]))
