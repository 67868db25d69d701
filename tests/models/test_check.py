"""`paged-backend check` says how a model would be run, or why it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from helpers_architectures import make_tiny
from helpers_models import save_model
from paged_backend.cli.app import app


def check(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["check", str(folder), "--dtype", "float32", "--kv-cache-memory", "1MiB", *options])


def test_it_prints_the_tier_the_layers_and_what_fits(tmp_path: Path) -> None:
    result = check(save_model(tmp_path), "--block-size", "8", "--max-num-seqs", "4")
    assert result.exit_code == 0, result.output
    lines = dict(line.split(maxsplit=1) for line in result.output.splitlines())
    assert lines["tier"].startswith("packed: ")
    assert lines["layers"] == "3 x full, 2 x 16"
    assert lines["self-check"].endswith("standard deviations of the logits from a plain run")
    assert lines["memory"] == f"{3 * 2 * 2 * 16 * 4} bytes per token"
    assert lines["fits"] == "1360 tokens, 4 sequences at once"
    assert "cache yes" in lines["prefix"]


def test_it_says_what_sequences_keep_and_that_they_share_nothing(tmp_path: Path) -> None:
    make_tiny("lfm2").save_pretrained(tmp_path)
    result = check(tmp_path)
    assert result.exit_code == 0, result.output
    assert "stateful" in result.output
    assert "bytes per sequence" in result.output
    assert "prefix cache no: " in result.output


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_refused_model_is_an_error_that_says_why(tmp_path: Path) -> None:
    make_tiny("doge").save_pretrained(tmp_path)
    result = check(tmp_path)
    assert result.exit_code == 1
    assert "no way to run it gives the logits of a plain run" in " ".join(result.output.split())
