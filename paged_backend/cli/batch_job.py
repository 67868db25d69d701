"""What `paged-backend run-batch` does with a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paged_backend import LLM
from paged_backend.cli.jsonl import JsonLines, input_lines, json_line, replace_atomically
from paged_backend.cli.progress import as_they_finish, at_once, progress_bar, watched
from paged_backend.server.batch import BadLine, BatchLine, answer_line, has_failed, parse_line
from paged_backend.server.models import Models


class BatchJob:
    """Takes the lines of a file that have no answer yet, and appends their answers to another one."""

    def __init__(self, input_file: Path, output_file: Path, error_file: Path, limit: int | None) -> None:
        self._input_file, self._output_file, self.error_file = input_file, output_file, error_file
        self._limit = limit

    async def run(self, llm: LLM, models: Models) -> int:
        """How many lines failed, those of earlier runs among them."""
        total = sum(1 for _ in self._lines())
        with JsonLines(self._output_file) as output:
            done_ids, done_lines = _finished(output)
            with progress_bar(total, len(done_ids) + len(done_lines)) as bar:
                async with watched(bar, llm):
                    left = self._left(done_ids, done_lines)
                    async for record in as_they_finish(
                        left, lambda line: _answer(models, line), at_once=at_once(llm, self._limit)
                    ):
                        output.append(record)
                        bar.advance(_num_tokens(record))
            failed = [record for record in output.entries() if has_failed(record)]
        self._report(failed)
        return len(failed)

    def _lines(self) -> Iterator[tuple[int, str | None]]:
        return ((number, text) for number, text in input_lines(self._input_file) if text is None or text.strip())

    def _left(self, done_ids: set[str], done_lines: set[int]) -> Iterator[BatchLine | BadLine]:
        """What has no answer yet."""
        seen: set[str] = set()
        for number, text in self._lines():
            try:
                line: BatchLine | BadLine = parse_line(number, text, seen)
            except BadLine as bad:
                line = bad
            if isinstance(line, BatchLine):
                seen.add(line.custom_id)
                if line.custom_id not in done_ids:
                    yield line
            elif number not in done_lines:
                yield line

    def _report(self, failed: list[dict[str, Any]]) -> None:
        if failed:
            replace_atomically(self.error_file, map(json_line, failed))
        else:
            self.error_file.unlink(missing_ok=True)


async def _answer(models: Models, line: BatchLine | BadLine) -> dict[str, Any]:
    return line.record if isinstance(line, BadLine) else await answer_line(models, line)


def _finished(output: JsonLines) -> tuple[set[str], set[int]]:
    """The ids of the requests that have an answer, and the numbers of the lines that are no requests."""
    done_ids, done_lines = set[str](), set[int]()
    for record in output.entries():
        if record.get("error") is not None:
            done_lines.add(record["error"]["line"])
        else:
            done_ids.add(record["custom_id"])
    return done_ids, done_lines


def _num_tokens(record: dict[str, Any]) -> int:
    response = record["response"] or {"body": {}}
    return int(response["body"].get("usage", {}).get("completion_tokens", 0))
