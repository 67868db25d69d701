"""Who waits for kernels to be compiled is told so, once, and nobody else is."""

from __future__ import annotations

import numba
import pytest

import paged_kernels


def make_kernels(num: int) -> list[numba.core.dispatcher.Dispatcher]:
    return [numba.njit(lambda x, i=i: x + i) for i in range(num)]


def test_the_first_of_several_compilations_is_told() -> None:
    told: list[str] = []
    first, second = make_kernels(2)
    with paged_kernels.telling_of_compilation(lambda: told.append("compiling")):
        assert told == []
        first(1)
        second(1)

    assert told == ["compiling"]


def test_what_is_compiled_already_or_later_is_not_told() -> None:
    told: list[str] = []
    before, after = make_kernels(2)
    before(1)
    with paged_kernels.telling_of_compilation(lambda: told.append("compiling")):
        before(2)
    after(1)

    assert told == []


def test_an_error_of_who_is_told_reaches_the_caller() -> None:
    def fail() -> None:
        raise KeyError("on purpose")

    (kernel,) = make_kernels(1)
    with pytest.raises(KeyError), paged_kernels.telling_of_compilation(fail):
        kernel(1)
