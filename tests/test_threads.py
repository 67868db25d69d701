"""How many cores there are for a process, as the operating system, a container's limits and other processes say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paged_backend.model.threads import ThreadCount, Usage, measure_usage, usable_cores

NUM_ALLOWED = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write(folder: Path, **contents: str) -> Path:
    """Files of a cgroup; `__` stands for a dot in their names, and `_in_` for the folder before it."""
    for name, content in contents.items():
        path = folder.joinpath(*name.replace("__", ".").split("_in_"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def test_without_a_limit_all_cores_that_the_process_may_run_on_are_used(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == NUM_ALLOWED
    assert usable_cores(write(tmp_path, cpu__max="max 100000\n")) == NUM_ALLOWED


@pytest.mark.parametrize("quota, num_cores", [(100_000, 1), (101_000, 2), (20_000, 1)])
def test_a_containers_share_of_time_is_rounded_up_to_cores(tmp_path: Path, quota: int, num_cores: int) -> None:
    num_cores = min(num_cores, NUM_ALLOWED)
    assert usable_cores(write(tmp_path / "new", cpu__max=f"{quota} 100000\n")) == num_cores
    old = {"cpu_in_cpu__cfs_quota_us": f"{quota}\n", "cpu_in_cpu__cfs_period_us": "100000\n"}
    assert usable_cores(write(tmp_path / "old", **old)) == num_cores


def test_a_share_above_the_cores_that_there_are_changes_nothing(tmp_path: Path) -> None:
    assert usable_cores(write(tmp_path, cpu__max=f"{(NUM_ALLOWED + 3) * 100_000} 100000\n")) == NUM_ALLOWED
    no_quota = {"cpu_in_cpu__cfs_quota_us": "-1\n", "cpu_in_cpu__cfs_period_us": "100000\n"}
    assert usable_cores(write(tmp_path, **no_quota)) == NUM_ALLOWED


class Machine:
    """Four cores, on which this process uses what is left, and others what they like."""

    def __init__(self) -> None:
        self.used: list[int] = []
        """Each number of threads that was asked for."""
        self._usage = Usage(50.0, 1000.0, 10.0)

    def pass_time(self, others: float, seconds: float = 0.5) -> None:
        """`others`: how many cores they use."""
        now, busy, own = self._usage
        own_seconds = (4 - others) * seconds
        self._usage = Usage(now + seconds, busy + others * seconds + own_seconds, own + own_seconds)

    def make_thread_count(self, most: int = 4) -> ThreadCount:
        options = {"clock": lambda: self._usage.now, "measure": lambda: self._usage, "use": self.used.append}
        return ThreadCount(most, 4, **options)  # type: ignore[arg-type]


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.mark.parametrize(
    "others, num_threads", [(0.3, 4), (0.5, 3), (1.0, 3), (1.3, 3), (1.7, 2), (2.0, 2), (3.0, 1), (4.0, 1)]
)
def test_there_are_as_many_threads_as_cores_that_others_leave(
    machine: Machine, others: float, num_threads: int
) -> None:
    threads = machine.make_thread_count()
    for _ in range(3):
        machine.pass_time(others)
        threads.adjust()

    assert machine.used == ([] if num_threads == 4 else [num_threads])


def test_threads_come_back_when_others_are_done_but_not_for_a_core_that_is_half_used(machine: Machine) -> None:
    threads = machine.make_thread_count()
    for others in (1.0, 0.35, 0.35, 0.1):
        machine.pass_time(others)
        threads.adjust()

    assert machine.used == [3, 4]


def test_fewer_threads_than_cores_leave_room_for_others(machine: Machine) -> None:
    threads = machine.make_thread_count(most=2)
    machine.pass_time(2.0)
    threads.adjust()
    assert machine.used == []
    machine.pass_time(3.0)
    threads.adjust()

    assert machine.used == [1]


def test_the_usage_is_looked_at_now_and_then_and_not_in_each_step(machine: Machine) -> None:
    threads = machine.make_thread_count()
    machine.pass_time(3.0, seconds=0.1)
    threads.adjust()
    assert machine.used == []
    machine.pass_time(3.0, seconds=0.4)
    threads.adjust()

    assert machine.used == [1]


def test_what_happened_while_there_was_nothing_to_do_does_not_count(machine: Machine) -> None:
    threads = machine.make_thread_count()
    machine.pass_time(3.0, seconds=100.0)
    threads.adjust()

    assert machine.used == []


def test_usage_counts_this_processes_own_work_as_its_own() -> None:
    before = measure_usage()
    while measure_usage().own < before.own + 0.2:
        sum(range(10_000))
    after = measure_usage()

    assert after.now > before.now
    assert after.busy - before.busy > 0.1
