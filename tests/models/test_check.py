"""`paged-backend check` says how a model would be run, or why it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from helpers_architectures import make_tiny
from helpers_models import make_model, save_model
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


def test_it_says_what_stays_of_tokens_behind_windows_and_how_many_fit_then(tmp_path: Path) -> None:
    folder = save_model(tmp_path, model=make_model("gemma3_text"))
    result = check(folder, "--block-size", "8", "--max-num-seqs", "64", "--max-num-batched-tokens", "32")
    assert result.exit_code == 0, result.output
    assert f"{4 * 2 * 2 * 16 * 4} bytes per token\n" in result.output
    assert f"{2 * 2 * 2 * 16 * 4} bytes per token that is behind all windows" in result.output
    (fits,) = (line for line in result.output.splitlines() if line.startswith("fits"))
    # Of a sequence of 512 tokens, two layers keep all and two the last 8: 64 and 2 blocks of 8, and 4 more while its
    # prompt is computed.
    num_blocks = 2**20 // (2 * 2 * 2 * 16 * 4 * 8)
    num_tokens = (num_blocks - 4) * 512 // 66
    assert fits.split(maxsplit=1)[1] == f"{num_tokens} tokens in sequences of 512, 64 sequences at once"


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
