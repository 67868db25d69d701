"""The tensors of a checkpoint, each read when it is asked for."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file

from paged_backend.errors import ModelError

_NAMES = ("model.safetensors", "pytorch_model.bin")


class TensorFiles(Mapping[str, Tensor]):
    """A checkpoint's tensors by name. Files are mapped into memory, so that what is not asked for is never read.

    Pickled files are read without running code from them. Raises ModelError if there are no files, or unknown ones.
    """

    def __init__(self, source: str, options: Mapping[str, Any], *, names: Sequence[str] = _NAMES) -> None:
        """`source` is a folder or a hub id, `options` what transformers' functions need to find it. Of `names` the
        first one that is there is read, whole or in parts."""
        self._names = names
        self._where = {name: value for name, value in options.items() if name != "trust_remote_code"}
        self._file_of: dict[str, Any] = {}
        for path in self._paths(source):
            self._open(path)

    def __getitem__(self, name: str) -> Tensor:
        file = self._file_of[name]
        tensor: Tensor = file[name] if isinstance(file, dict) else file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def _paths(self, source: str) -> list[Path]:
        for name in self._names:
            if (path := self._find(source, name)) is not None:
                return [path]
            if (index := self._find(source, f"{name}.index.json")) is not None:
                names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
                paths = [self._find(source, part) for part in names]
                if None in paths:
                    raise ModelError(f"model={source!r} lacks {names[paths.index(None)]}, which its index names")
                return [path for path in paths if path is not None]
        raise ModelError(f"model={source!r} has neither {' nor '.join(self._names)}, whole or in parts")

    def _find(self, source: str, name: str) -> Path | None:
        path = cached_file(
            source,
            name,
            **self._where,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
        return None if path is None else Path(path)

    def _open(self, path: Path) -> None:
        try:
            if path.suffix == ".safetensors":
                file = safe_open(path, framework="pt")
                self._file_of |= dict.fromkeys(file.keys(), file)  # type: ignore[no-untyped-call]
            else:
                tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                self._file_of |= dict.fromkeys(tensors, tensors)
        except Exception as error:  # whatever broken files, or pickles with more than tensors, raise
            raise ModelError(f"{path} cannot be read: {problem_of(error)}") from error


def problem_of(error: Exception) -> str:
    """Why weights could not be read, without torch's advice on how to run what a pickled file holds beside them."""
    if not isinstance(error, pickle.UnpicklingError):
        return str(error)
    named = re.search(r"GLOBAL (\S+)", str(error))
    what = f" ({named[1]})" if named else ""
    return f"there is more than tensors in a pickled file{what}, and its code is never run; save it as safetensors"
