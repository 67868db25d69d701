"""Writes the table of docs/models.md: `python tests/models/table.py`, with paged_backend and tests on the path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers_architectures import ARCHITECTURES
from helpers_sweep import sweep_row, write_rows

if __name__ == "__main__":
    rows = []
    for architecture in ARCHITECTURES:
        rows.append(sweep_row(architecture))
        sys.stderr.write(rows[-1].markdown)
    write_rows(rows)
