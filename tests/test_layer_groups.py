"""Which layers share block tables."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_backend.engine.kv_layout import EVERYTHING, Reach
from paged_backend.model.attention import LayerSpec
from paged_backend.model.layer_groups import LayerGroups, layer_groups

FULL = LayerSpec(1, 8, 8, 1.0, None, None, None)
LONG = 8192


def sliding(window: int = 512) -> LayerSpec:
    return FULL._replace(window=window)


def sizes(groups: LayerGroups) -> dict[Reach, list[int]]:
    """How many layers there are in the groups of each reach."""
    nums = Counter(groups.group_of)
    found: dict[Reach, list[int]] = {}
    for group, reach in enumerate(groups.reaches):
        found.setdefault(reach, []).append(nums[group])
    return found


@pytest.mark.parametrize(
    "specs, expected",
    [
        ([*[sliding()] * 5, FULL] * 3, {EVERYTHING: [3], Reach(512): [3] * 5}),  # Gemma 3 270M
        ([*[sliding()] * 5, FULL] * 4 + [sliding()] * 2, {EVERYTHING: [4], Reach(512): [4] * 5 + [2]}),  # Gemma 3 1B
        ([sliding(4096), FULL] * 13, {EVERYTHING: [13], Reach(4096): [13]}),  # Gemma 2 2B
        ([sliding(128), FULL] * 12, {EVERYTHING: [12], Reach(128): [12]}),  # GPT-OSS
        ([*[FULL._replace(chunk=1024)] * 3, FULL] * 12, {EVERYTHING: [12], Reach(chunk=1024): [12] * 3}),  # Llama 4
        ([sliding()] * 6, {Reach(512): [6]}),
        ([FULL] * 6, {EVERYTHING: [6]}),
        ([sliding(512), sliding(4096)] * 4, {Reach(4096): [4], Reach(512): [4]}),
    ],
)
def test_layers_that_look_equally_far_back_are_groups_of_equally_many(specs: list[Any], expected: Any) -> None:
    assert sizes(layer_groups(specs, 16, LONG)) == expected


@pytest.mark.parametrize(
    "specs, max_model_len, reach",
    [
        ([sliding(), FULL] * 3, 512, EVERYTHING),
        ([sliding(500), FULL] * 3, 520, EVERYTHING),
        ([sliding(), FULL._replace(head_size=16)] * 3, LONG, EVERYTHING),
        ([sliding(512), sliding(4096)._replace(num_kv_heads=2)] * 3, LONG, Reach(4096)),
        ([sliding(), FULL._replace(chunk=512)._replace(num_kv_heads=2)] * 3, LONG, EVERYTHING),
        ([], LONG, EVERYTHING),
    ],
)
def test_layers_are_one_group_where_nothing_is_gained_or_their_blocks_would_differ(
    specs: list[Any], max_model_len: int, reach: Reach
) -> None:
    groups = layer_groups(specs, 16, max_model_len)
    assert groups.reaches == (reach,)
    assert groups.place_of == list(range(len(specs)))


def test_keys_and_values_that_layers_share_are_kept_as_long_as_one_of_them_looks_at_them() -> None:
    specs = [sliding(), FULL, sliding(), FULL._replace(source=0), sliding()._replace(source=1)]
    groups = layer_groups(specs, 16, LONG)
    assert groups.reaches[groups.group_of[0]] == EVERYTHING
    assert (groups.group_of[3], groups.place_of[3]) == (groups.group_of[0], groups.place_of[0])
    assert (groups.group_of[4], groups.place_of[4]) == (groups.group_of[1], groups.place_of[1])


@given(
    specs=st.lists(st.sampled_from([FULL, sliding(64), sliding(512), FULL._replace(chunk=128)]), min_size=1),
    max_model_len=st.sampled_from([32, 100, 600, 5000]),
)
def test_no_two_layers_of_a_group_have_one_place_and_nobody_sees_less_than_it_looks_at(
    specs: list[LayerSpec], max_model_len: int
) -> None:
    groups = layer_groups(specs, 16, max_model_len)
    places = list(zip(groups.group_of, groups.place_of, strict=True))
    assert len(set(places)) == len(specs)
    assert max(groups.place_of) + 1 == max(Counter(groups.group_of).values())
    for spec, group in zip(specs, groups.group_of, strict=True):
        own, reach = Reach(spec.window, spec.chunk), groups.reaches[group]
        assert all(reach.first_visible(position) <= own.first_visible(position) for position in range(max_model_len))
    assert groups.reaches[0].num_behind == max(reach.num_behind for reach in groups.reaches)
