"""Tests of the kernels for GPUs, on machines that have Triton; interpreted ones take half as long as they would."""

from __future__ import annotations

import importlib.util
from typing import Any

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["*"]
else:
    import triton.language as tl
    from triton.runtime import interpreter

    _patch, _run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    _patched: set[tuple[bool, bool]] = set()
    """Which of its modules a launch has prepared."""

    def _patch_once(function: Any) -> Any:
        modules = list(map(id, function.__globals__.values()))
        key = (id(tl) in modules, id(tl.core) in modules)
        if key in _patched:
            return None
        _patched.add(key)
        return _patch(function)

    def _run_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        _patched.clear()
        _run(self, *args, **kwargs)

    # The original prepares Triton's language anew for each call of a function by a kernel.
    interpreter._patch_lang, interpreter.GridExecutor.__call__ = _patch_once, _run_anew
