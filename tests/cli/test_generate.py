"""`paged-backend generate`: a file of prompts, every line once."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers_cli import Fakes, failed, run
from paged_backend import EngineDeadError
from paged_backend.cli.jsonl import JsonLines
from paged_backend.cli.progress import as_they_finish
from paged_backend.engine.scheduler import SchedulerOutput


def test_generate_keeps_the_order_of_the_prompts(fakes: Fakes, tmp_path: Path) -> None:
    fakes.script = []
    source, target, again = (tmp_path / name for name in ("prompts.txt", "results.txt", "again.txt"))
    source.write_bytes("\ufeffone\r\n\r\nthree\r\nvier \N{SLIGHTLY SMILING FACE}".encode())
    options = ("--max-tokens", "5", "--temperature", "0")
    assert run("generate", "m", "-i", str(source), "-o", str(target), *options).exit_code == 0
    lines = target.read_text().split("\n")
    assert len(lines) == 5 and lines[1] == "" == lines[4] and len(set(lines)) == 4
    source.write_text("three\none\n")
    assert run("generate", "m", "-i", str(source), "-o", str(again), *options).exit_code == 0
    assert again.read_text().split("\n")[:2] == [lines[2], lines[0]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.txt", "prompts.txt", "results.txt"]


def test_generate_reads_and_writes_json_lines(fakes: Fakes, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines: list[Any] = [
        "text",
        {"prompt": [104, 105], "max_tokens": 2},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    bad: list[Any] = [{"prompt": "x", "temperature": 9}, {"nothing": 1}, {"prompt": "x", "n": 2}]
    source.write_text("\n".join(map(json.dumps, lines + bad)) + "\n{broken\n" + "[" * 100_000 + "\n")
    result = run("generate", "m", "-i", str(source), "-o", str(target), "--max-tokens", "4")
    assert "5 of 8 prompts failed" in failed(result, 3)
    results = [json.loads(line) for line in target.read_text().splitlines()]
    assert [entry.get("text") for entry in results] == ["abcd", "ab", "abcd", *[None] * 5]
    assert "temperature=9" in results[3]["error"]


def test_generate_overwrites_only_if_told_to(fakes: Fakes, tmp_path: Path) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("one\n")
    target.write_text("precious")
    arguments = ("generate", "m", "-i", str(source), "-o", str(target), "--max-tokens", "4")
    assert "--overwrite" in failed(run(*arguments))
    assert target.read_text() == "precious"
    assert run(*arguments, "--overwrite").exit_code == 0
    assert target.read_text() == "abcd\n"


def test_generate_does_not_overwrite_its_input(fakes: Fakes, tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("one\n")
    complaint = failed(run("generate", "m", "-i", str(source), "-o", str(source), "--overwrite"))
    assert "is the input too" in complaint and source.read_text() == "one\n"


def test_generate_resumes_only_what_was_asked_for_alike(fakes: Fakes, tmp_path: Path) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("one\ntwo\n")
    with JsonLines(tmp_path / "out.txt.partial") as journal:
        journal.append({"settings": {"model": "m", "chat": False, "max_tokens": 4}})
        journal.append({"index": 0, "line": "one", "text": "kept", "usage": {"completion_tokens": 1}})
        journal.append({"index": 1, "line": "tow", "text": "of another line", "usage": {"completion_tokens": 1}})
    arguments = ("generate", "m", "-i", str(source), "-o", str(target), "--max-tokens")
    assert "other settings" in failed(run(*arguments, "5"))
    assert run(*arguments, "4").exit_code == 0
    assert target.read_text() == "kept\nabcd\n"


def test_generate_asks_again_after_the_engine_died(fakes: Fakes, tmp_path: Path) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("".join(f"prompt {number}\n" for number in range(20)))
    arguments = ("generate", "m", "-i", str(source), "-o", str(target), "--max-tokens", "4", "--max-num-seqs", "2")
    fakes.on_step = dying_after(20)
    died = run(*arguments)
    assert died.exit_code == 1 and "error: the engine died of SystemExit" in died.output
    assert not target.exists()
    before = (tmp_path / "out.txt.partial").read_text().splitlines()
    assert 1 < len(before) < 21 and "error" not in "".join(before)
    fakes.on_step = lambda output: None
    assert run(*arguments).exit_code == 0
    assert target.read_text() == "abcd\n" * 20


def test_generate_asks_again_for_what_failed(fakes: Fakes, tmp_path: Path) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("one\n")
    with JsonLines(tmp_path / "out.txt.partial") as journal:
        journal.append({"settings": {"model": "m", "chat": False, "max_tokens": 4}})
        journal.append({"index": 0, "line": "one", "error": "bad luck", "usage": {"completion_tokens": 0}})
    assert run("generate", "m", "-i", str(source), "-o", str(target), "--max-tokens", "4").exit_code == 0
    assert target.read_text() == "abcd\n"


@pytest.mark.slow
def test_a_killed_generate_loses_nothing_and_does_nothing_twice(killed: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("".join(f"prompt {number}\n" for number in range(200)))
    command = ("generate", "m", "-i", str(source), "-o", str(target), "--max-tokens", "8", "--max-num-seqs", "4")
    before = killed(tmp_path / "out.jsonl.partial", 20, *command)
    after = [json.loads(line) for line in target.read_text().splitlines()]
    assert [entry["line"] for entry in after] == source.read_text().splitlines()
    kept = {entry["index"]: entry for entry in map(json.loads, before[1:])}
    assert 0 < len(kept) < 200
    assert all(after[index] == entry for index, entry in kept.items())


async def test_of_requests_that_fail_together_none_is_reported_late() -> None:
    late: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: late.append(context))

    async def fail(number: int) -> None:
        raise EngineDeadError("dead")

    with pytest.raises(EngineDeadError):
        async for _ in as_they_finish(range(4), fail, at_once=4):
            pass
    gc.collect()
    assert late == []


def dying_after(num_steps: int) -> Callable[[SchedulerOutput], None]:
    left = iter(range(num_steps))

    def step(output: SchedulerOutput) -> None:
        if next(left, None) is None:
            raise SystemExit("on purpose")

    return step
