"""While an engine is made, no garbage is collected by itself; afterwards all is as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from paged_backend.garbage import no_garbage_collection


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.enable()


def test_collection_is_off_inside_and_on_again_after_an_error() -> None:
    with pytest.raises(KeyError), no_garbage_collection():
        assert not gc.isenabled()
        raise KeyError

    assert gc.isenabled()


def test_who_has_switched_collection_off_finds_it_off() -> None:
    gc.disable()
    with no_garbage_collection():
        pass

    assert not gc.isenabled()


def test_what_was_made_inside_is_old_and_can_still_be_collected() -> None:
    with no_garbage_collection():
        cycle: list[object] = []
        cycle.append(cycle)
    assert any(item is cycle for item in gc.get_objects(generation=2))
    del cycle

    assert gc.collect() > 0


def test_what_somebody_has_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        with no_garbage_collection():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
