"""Which layers share block tables: those that look equally far back, in groups of equally many."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from paged_backend.engine.kv_layout import EVERYTHING, Reach
from paged_backend.model.attention import LayerSpec
from paged_backend.model.kv_cache import KVShape

_TABLE_COST = 0.03
"""The share of the memory that one more table per sequence has to save to be worth it."""


class LayerGroups(NamedTuple):
    """A block holds keys and values of one group's layers; the place of a layer says where in it."""

    reaches: tuple[Reach, ...]
    """Of each group; no layer looks further back than those of the first one."""
    group_of: list[int]
    """Of each layer."""
    place_of: list[int]
    """Of each layer; layers of different groups have the same one, and so the same tensors, in different blocks."""

    def tell(self, specs: Sequence[KVShape]) -> list[KVShape]:
        """The layers, which know their groups."""
        pairs = zip(specs, self.group_of, strict=True)
        return [spec._replace(group=group) if isinstance(spec, LayerSpec) else spec for spec, group in pairs]

    def layers_of_the_past(self, specs: Sequence[KVShape]) -> list[KVShape]:
        """Those that keep tokens however old they are."""
        reaches = [self.reaches[group] for group in self.group_of]
        return [spec for spec, reach in zip(specs, reaches, strict=True) if not reach.is_limited]

    def layers_of_block(self, specs: Sequence[KVShape]) -> list[KVShape]:
        """One for each place."""
        return list({place: spec for spec, place in zip(specs, self.place_of, strict=True) if spec.is_stored}.values())


def layer_groups(specs: Sequence[KVShape], block_size: int, max_model_len: int) -> LayerGroups:
    """The groups with which sequences of `max_model_len` tokens take least memory.

    All layers are one group if that costs about as much, if their keys and values have different sizes or if the
    engine does not know how far they look back.
    """
    stored = [index for index, spec in enumerate(specs) if spec.is_stored]
    reaches = _reaches(specs, max_model_len)
    kinds: dict[Reach, list[int]] = {}
    for index in stored:
        kinds.setdefault(reaches[index], []).append(index)

    def num_kept(reach: Reach) -> int:
        """Tokens of a sequence that a layer keeps."""
        return min(max_model_len, reach.num_behind + block_size)

    def cost(size: int) -> float:
        """Of groups of so many layers."""
        nums_groups = {reach: -(-len(layers) // size) for reach, layers in kinds.items()}
        memory = size * sum(num_groups * num_kept(reach) for reach, num_groups in nums_groups.items())
        return memory * (1 + _TABLE_COST * sum(nums_groups.values()))

    widest = functools.reduce(_union, kinds, EVERYTHING if not kinds else next(iter(kinds)))
    groups = [(widest, stored)]
    if len(kinds) > 1 and _are_alike([specs[index] for index in stored]):
        size = min(range(1, len(stored)), key=cost)
        if cost(size) < len(stored) * num_kept(widest) * (1 + _TABLE_COST):
            groups = [
                (reach, kinds[reach][start : start + size])
                for reach in sorted(kinds, key=num_kept, reverse=True)
                for start in range(0, len(kinds[reach]), size)
            ]
    return _of(groups, specs)


def _of(groups: list[tuple[Reach, list[int]]], specs: Sequence[KVShape]) -> LayerGroups:
    places = {index: (group, place) for group, (_, layers) in enumerate(groups) for place, index in enumerate(layers)}
    of_layers = [places[index if spec.source is None else spec.source] for index, spec in enumerate(specs)]
    return LayerGroups(
        reaches=tuple(reach for reach, _ in groups),
        group_of=[group for group, _ in of_layers],
        place_of=[place for _, place in of_layers],
    )


def _reaches(specs: Sequence[KVShape], max_model_len: int) -> list[Reach]:
    """Of each layer, and of all that read its keys and values."""
    reaches = [_reach(spec, max_model_len) for spec in specs]
    for spec, reach in zip(specs, list(reaches), strict=True):
        if spec.source is not None:
            reaches[spec.source] = _union(reaches[spec.source], reach)
    return reaches


def _reach(spec: KVShape, max_model_len: int) -> Reach:
    if not isinstance(spec, LayerSpec):
        return EVERYTHING
    window, chunk = (size if size and size < max_model_len else None for size in (spec.window, spec.chunk))
    return Reach(window, chunk)


def _union(one: Reach, other: Reach) -> Reach:
    """What sees all that one of them sees."""
    return Reach(_wider(one.window, other.window), _wider(one.chunk, other.chunk))


def _wider(size: int | None, other: int | None) -> int | None:
    return None if size is None or other is None else max(size, other)


def _are_alike(specs: Sequence[KVShape]) -> bool:
    """Whether their keys and values can have the same tensors."""
    shapes = {(spec.num_kv_heads, spec.head_size, spec.value_head_size, spec.has_own_values) for spec in specs}
    return len(shapes) == 1
