"""The command `paged-backend`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

from paged_backend import MissingExtraError

INTERRUPTED = 130
"""The exit code."""


def main() -> None:
    """The console script; without the extra it says how to install it."""
    try:
        with of_the_extra():
            from paged_backend.cli.app import app
    except MissingExtraError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            _leave_at_once()
        raise


@contextlib.contextmanager
def of_the_extra() -> Iterator[None]:
    """What is imported meanwhile comes with the extra; raises MissingExtraError if it is not there."""
    try:
        yield
    except ImportError as error:
        if error.name is None or error.name.startswith("paged_backend"):
            raise
        raise MissingExtraError("the command paged-backend", "server") from error


def _leave_at_once() -> NoReturn:
    """Without the interpreter's end, which takes the libraries away from threads that are still loading a model."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(INTERRUPTED)
