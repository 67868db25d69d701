"""Files of JSON lines that survive a kill: whole lines are appended, and a half one is cut off by the next run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class JsonLines:
    """A file to append objects to, each with one write; made by opening it, which first cuts off a half last line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(self._file, _length_of_whole_lines(path))

    def entries(self) -> Iterator[dict[str, Any]]:
        """What is in it; lines that are no objects are passed over."""
        with self._path.open("rb") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue
                if isinstance(entry, dict):
                    yield entry

    def append(self, entry: dict[str, Any]) -> None:
        data = (json_line(entry) + "\n").encode()
        while data:  # a write may be cut short, if the disk is full say
            data = data[os.write(self._file, data) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)


def json_line(entry: Any) -> str:
    """As readable text; as ASCII if it holds what is no Unicode text, so that nothing of it is lost."""
    line = json.dumps(entry, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:
        return json.dumps(entry)
    return line


def replace_atomically(path: Path, lines: Iterator[str]) -> None:
    """Write a file of lines that appears as a whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{line}\n" for line in lines)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def input_lines(path: Path) -> Iterator[tuple[int, str | None]]:
    """Number, from 1, and text of each line; None for one that is not UTF-8. A BOM and CRLF are no part of the text."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.rstrip(b"\r\n").decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                yield number, None
            else:
                yield number, text


def _length_of_whole_lines(path: Path) -> int:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        position = size
        while position > 0:
            start = max(0, position - 65536)
            file.seek(start)
            found = file.read(position - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            position = start
    return 0
