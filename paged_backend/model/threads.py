"""How many threads compute: no more than there are cores for them.

Threads that share an operation wait for the slowest of them, several hundred times a step. If one of them has to share
its core with another process, they all wait for the operating system to give it a turn: fewer threads are faster then.
"""

from __future__ import annotations

import logging
import math
import os
import pathlib
import time
from collections.abc import Callable
from typing import NamedTuple

import psutil
import torch

logger = logging.getLogger(__name__)

_CGROUPS = pathlib.Path("/sys/fs/cgroup")
_WINDOW_SECONDS = 0.5
_MOST_SECONDS = 2.0
"""A longer window began when there was nothing to do, and says nothing about now."""
_SMALL_SHARE = 0.4
"""A core of which others use less than this is worth a thread; to get one more, half of it."""


class Usage(NamedTuple):
    """Seconds until now."""

    now: float
    busy: float
    """Of all cores that this process may run on, whoever used them; but for those with a low priority, who make way."""
    own: float
    """What this process has used."""


def measure_usage() -> Usage:
    allowed = psutil.Process().cpu_affinity() if hasattr(psutil.Process, "cpu_affinity") else None
    cores = psutil.cpu_times(percpu=True)
    busy = sum(_busy_seconds(core) for i, core in enumerate(cores) if allowed is None or i in allowed)
    return Usage(time.monotonic(), busy, time.process_time())


def _busy_seconds(core: NamedTuple) -> float:
    return float(sum(getattr(core, name, 0.0) for name in ("user", "system", "irq", "softirq", "steal")))


class ThreadCount:
    """Keeps the number of threads at that of the cores that no other process uses, but between 1 and `most`."""

    def __init__(
        self,
        most: int,
        num_cores: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        measure: Callable[[], Usage] = measure_usage,
        use: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        """`num_cores` is the number of those that this process may run on; `use` is told when the number changes, and
        `clock` the time of a `Usage`."""
        self._most = self._num_threads = most
        self._num_cores = num_cores
        self._clock = clock
        self._measure = measure
        self._use = use
        self._last = measure()

    def adjust(self) -> None:
        """Called in each step; looks at the usage twice a second."""
        if self._most == 1 or self._clock() < self._last.now + _WINDOW_SECONDS:
            return
        last, self._last = self._last, self._measure()
        seconds = self._last.now - last.now
        if seconds > _MOST_SECONDS:
            return
        others = max(0.0, self._last.busy - last.busy - (self._last.own - last.own)) / seconds
        num_threads = self._num_for(self._num_cores - others)
        if num_threads != self._num_threads:
            logger.debug("%d threads, since others use %.1f cores", num_threads, others)
            self._num_threads = num_threads
            self._use(num_threads)

    def _num_for(self, num_free: float) -> int:
        fewer, more = int(num_free + _SMALL_SHARE), int(num_free + _SMALL_SHARE / 2)
        return max(1, min(self._most, max(more, min(fewer, self._num_threads))))


def thread_count(num_processes: int = 1) -> ThreadCount:
    """For the thread that calls it, which computes: torch, and the kernels after it, use no more threads than there are
    cores to run them, shared by `num_processes` that compute alike.

    torch looks at the cores that a process may run on, and not at a container's share of their time: with more threads
    than that, all of them are stopped for a part of each tenth of a second. OMP_NUM_THREADS has the last word.
    """
    most = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        most = max(1, min(most, usable_cores() // num_processes))
        torch.set_num_threads(most)
    return ThreadCount(most, _num_allowed_cores())


def usable_cores(cgroups: pathlib.Path = _CGROUPS) -> int:
    """Cores this process may run on, or those that its container's share of time is worth, the last one in part."""
    quotas = [quota for quota in (_quota_v2(cgroups), _quota_v1(cgroups)) if quota is not None]
    return max(1, min([_num_allowed_cores(), *map(math.ceil, quotas)]))


def _num_allowed_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS, Windows


def _quota_v2(cgroups: pathlib.Path) -> float | None:
    """Cores' worth of time, from `<microseconds or max> <period>`."""
    try:
        quota, period = (cgroups / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # not Linux, not this version, or no limit ("max")
        return None


def _quota_v1(cgroups: pathlib.Path) -> float | None:
    try:
        quota, period = (int((cgroups / "cpu" / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 else None
