"""What tests of draws try, on CPUs and on GPUs."""

from __future__ import annotations

from typing import Any

FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 900},
    {"min_p": 0.02},
    {"top_p": 0.5},
    {"top_p": 0.999, "temperature": 2.0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    {"temperature": 1.5, "min_p": 0.01, "top_k": 300, "top_p": 0.9},
]
