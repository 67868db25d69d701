"""Checks shared by the two frozen settings classes, so that both word their errors alike."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeVar

from paged_backend.errors import ConfigError, InvalidRequestError, unknown_argument

T = TypeVar("T")
SettingsError = type[ConfigError] | type[InvalidRequestError]


def rejects_unknown_arguments(error: SettingsError) -> Callable[[type[T]], type[T]]:
    """A class decorator: an unknown keyword raises `error` naming the nearest known one, not a bare TypeError."""

    def decorate(cls: type[T]) -> type[T]:
        init: Callable[..., None] = cls.__init__
        known = list(inspect.signature(init).parameters)[1:]

        @functools.wraps(init)
        def checked_init(self: T, *args: Any, **kwargs: Any) -> None:
            for name in kwargs:
                if name not in known:
                    raise error(unknown_argument(cls.__name__, name, known), field=name)
            init(self, *args, **kwargs)

        cls.__init__ = checked_init  # type: ignore[assignment, method-assign]
        return cls

    return decorate


def is_finite(value: float) -> bool:
    """`math.isfinite`, also for integers that no float can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


class Checker:
    """Raises `error` with the name, the value and the limit of the first field that is out of range."""

    def __init__(self, error: SettingsError, settings: object) -> None:
        self._error = error
        self._settings = settings

    def fail(self, name: str, must: str) -> None:
        message = f"{name}={getattr(self._settings, name)!r} is out of range: it must be {must}"
        raise self._error(message, field=name)

    def integer(self, name: str, low: int, high: int | None = None, *, optional: bool = False) -> None:
        value = getattr(self._settings, name)
        if optional and value is None:
            return
        limit = f"an integer ≥ {low}" if high is None else f"an integer from {low} to {high}"
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            self.fail(name, limit + (" or None" if optional else ""))

    def number(self, name: str, low: float, high: float, *, open_low: bool = False) -> None:
        value = getattr(self._settings, name)
        limit = f"a number in {'(' if open_low else '['}{low:g}, {high:g}{')' if high == math.inf else ']'}"
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_finite(value):
            self.fail(name, limit)
        if value > high or value < low or (open_low and value == low):
            self.fail(name, limit)

    def flag(self, *names: str) -> None:
        for name in names:
            if not isinstance(getattr(self._settings, name), bool):
                self.fail(name, "True or False")

    def choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self._settings, name) not in choices:
            self.fail(name, "one of " + ", ".join(map(repr, choices)))
