"""Every error this package raises on purpose.

::

    PagedBackendError
    ├── ConfigError          (ValueError)    a setting of the engine is impossible
    ├── InvalidRequestError  (ValueError)    a request can never be served as asked; nothing of its batch was queued
    ├── ModelError           (ValueError)    the model cannot be loaded, or the engine would get it wrong
    ├── MissingExtraError    (ImportError)   an optional dependency is not installed; the message has the command
    ├── OverloadedError      (RuntimeError)  the queue is full; try again later
    ├── RequestTimeoutError  (TimeoutError)  the request's own `timeout` ran out
    └── EngineError          (RuntimeError)  a step failed; the engine goes on
        └── EngineDeadError                  the engine is closed, or cannot go on
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class PagedBackendError(Exception):
    """The base of the tree above."""


class _AboutAField(PagedBackendError, ValueError):
    """`field` is the argument or parameter that the message is about; None if it is about none in particular."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ConfigError(_AboutAField):
    """A setting of the engine is impossible. `field` is its name, if the message is about one."""


class InvalidRequestError(_AboutAField):
    """A request can never be served as asked; nothing of its batch was queued. `field` is the argument or the sampling
    parameter that the message is about, if it is about one; what is said of a prompt has the field `prompt`, or
    `messages` if it was made of those."""


class ModelError(PagedBackendError, ValueError):
    """The model cannot be loaded, or the engine would get it wrong."""


class MissingExtraError(PagedBackendError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an optional dependency; install it with: pip install 'paged-backend[{extra}]'")


class OverloadedError(PagedBackendError, RuntimeError):
    """The queue is full; try again later."""


class RequestTimeoutError(PagedBackendError, TimeoutError):
    """The request's own `timeout` ran out."""


class EngineError(PagedBackendError, RuntimeError):
    """A step failed; its requests are lost and the engine goes on."""


class GrammarError(PagedBackendError, RuntimeError):
    """An output left its grammar, or following the grammar became too expensive: the cause of an EngineError."""


class EngineDeadError(EngineError):
    """The engine is closed, or cannot go on."""


@contextlib.contextmanager
def blamed_on(field: str, *, instead_of: str | None = None) -> Iterator[None]:
    """What is refused meanwhile is refused because of `field`: all of it, or what would be because of another one."""
    try:
        yield
    except InvalidRequestError as error:
        if instead_of in (None, error.field):
            error.field = field
        raise


def unknown_argument(where: str, name: str, known: Iterable[str]) -> str:
    """The message for an argument nobody knows, with the nearest known name."""
    return f"{where} has no argument {name!r}; {_nearest(name, known, 'known arguments', cutoff=0.5)}"


def unknown_name(where: str, name: str, known: Iterable[str]) -> str:
    """The same in the words of the adapters, whose callers give names to a model or to one of its calls."""
    return f"{where} takes no argument {name!r}; {_nearest(name, known, 'known names', cutoff=0.6)}"


def _nearest(name: str, known: Iterable[str], title: str, *, cutoff: float) -> str:
    known = sorted(known)
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"did you mean {nearest[0]!r}?" if nearest else f"{title}: {', '.join(known)}"
