"""Every causal-LM architecture of transformers: which ones run, how, and that no table row gets worse.

docs/models.md has the table. `python tests/models/table.py` writes it anew.
"""

from __future__ import annotations

import pytest

from helpers_architectures import ARCHITECTURES
from helpers_sweep import Row, documented_rows, sweep_row
from paged_backend.model.ways import Tier

EVERYDAY = (
    "bloom",
    "deepseek_v3",
    "deepseek_v32",
    "gemma4_text",
    "jamba",
    "kimi_linear",
    "lfm2",
    "llama4_text",
    "mamba2",
    "minimax",
    "qwen3_next",
    "recurrent_gemma",
    "roberta",
)

OWN_CACHE = Row("any", str(Tier.OWN_CACHE), False, "")


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return documented_rows()


def check(architecture: str, rows: dict[str, Row]) -> None:
    documented = rows[architecture]
    row = sweep_row(architecture)
    assert row.rank >= documented.rank, f"{architecture} was {documented.way!r} and is {row.way!r}: {row.remark}"
    assert row.shares_prefixes or not documented.shares_prefixes


@pytest.mark.parametrize("architecture", EVERYDAY)
def test_one_of_each_kind_runs_as_documented(architecture: str, rows: dict[str, Row]) -> None:
    check(architecture, rows)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in EVERYDAY])
def test_no_architecture_is_run_in_a_worse_way_than_documented(architecture: str, rows: dict[str, Row]) -> None:
    if architecture not in rows:
        pytest.skip("newer than the table: python tests/models/table.py")
    check(architecture, rows)


def test_the_table_has_a_row_for_every_architecture_that_was_promised(rows: dict[str, Row]) -> None:
    num_batched = sum(row.rank > OWN_CACHE.rank for row in rows.values())
    num_served = sum(row.rank > 0 for row in rows.values())
    assert num_batched >= 163
    assert num_served >= 173
