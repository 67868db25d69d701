"""Runs a model in the engine as crowds of requests would, and compares the logits of every token with a plain run."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from helpers_architectures import VOCAB_SIZE, make_tiny
from paged_backend import SamplingParams
from paged_backend.config import EngineConfig
from paged_backend.engine.kv_cache_manager import KVCacheManager
from paged_backend.engine.request import Request
from paged_backend.engine.scheduler import Scheduler
from paged_backend.model.loader import load
from paged_backend.model.model_call import ModelCall
from paged_backend.model.runner import ModelRunner
from paged_backend.model.ways import Tier, Verdict

DOCUMENT = Path(__file__).parents[1] / "docs" / "models.md"
TABLE_MARK = "<!-- what follows is written by tests/models/table.py -->\n"
REFUSED, NOT_BUILT = "refused", "not tried"
_RANKS = {str(tier): rank for rank, tier in enumerate(reversed(Tier), start=1)} | {REFUSED: 0, NOT_BUILT: 0}
_MOST_OF_A_REASON = 200

PROMPT_LENGTHS = (13, 22, 9)
NUM_NEW = 6
BLOCK_SIZE = 4
MAX_STEP_TOKENS = 12
LARGEST_DIFFERENCE = 2e-3  # 1e-4 but for Zamba 2, where as much is between transformers' own ways to run it


class Result(NamedTuple):
    """How an architecture fared."""

    verdict: Verdict
    difference: float
    """The largest of any logit."""
    num_cached_tokens: int
    """Found in the prefix cache when the same prompts came again."""


def sweep(architecture: str) -> Result:
    """Chunked prefill, mixed batches, decode, preemption and prefix reuse. Raises what the engine refuses it with, and
    AssertionError if a logit differs."""
    model = make_tiny(architecture)
    config = EngineConfig(device="cpu", block_size=BLOCK_SIZE, num_gpu_blocks_override=96, max_num_seqs=8)
    runner = ModelRunner(load(model, None, config), config)
    crowd = Crowd(runner, model)
    crowded, roomy = crowd.scheduler(), crowd.scheduler()
    difference = crowd.compute(crowded, all_logits=True, is_crowded=True)
    # Where all layers slide, blocks are given back as fast as others are taken.
    assert crowded.num_preemptions > 0 or runner.reaches[0].is_limited
    # Both have the same pages, so that what one has cached is gone once the other one has run.
    for all_logits in (True, False, False):
        difference = max(difference, crowd.compute(roomy, all_logits=all_logits))
    assert difference < LARGEST_DIFFERENCE, f"{architecture}: logits differ by {difference:.2g}"
    return Result(runner.verdict, difference, roomy.kv_cache_manager.num_hit_tokens)


class Crowd:
    """Some sequences, the first part of each a prompt, the rest what is "sampled"."""

    def __init__(self, runner: ModelRunner, model: PreTrainedModel) -> None:
        generator = torch.Generator().manual_seed(7)
        # Neither special ids, which some models treat in their own way, nor the last ones, which some reserve.
        self._token_ids = [
            torch.randint(3, VOCAB_SIZE - 8, (length + NUM_NEW,), generator=generator).tolist()
            for length in PROMPT_LENGTHS
        ]
        self._runner = runner
        with torch.inference_mode():
            self._expected = [ModelCall(model).plain(torch.tensor(ids)) for ids in self._token_ids]

    def scheduler(self) -> Scheduler:
        caches = not self._runner.verdict.keeps_state
        manager = KVCacheManager(
            self._runner.num_blocks,
            BLOCK_SIZE,
            enable_prefix_caching=caches,
            reaches=self._runner.reaches,
            max_step_tokens=MAX_STEP_TOKENS,
        )
        return Scheduler(manager, max_num_seqs=8, max_num_batched_tokens=MAX_STEP_TOKENS, max_model_len=64)

    @torch.inference_mode()
    def compute(self, scheduler: Scheduler, *, all_logits: bool, is_crowded: bool = False) -> float:
        """The largest difference of any logit, of all tokens or of those that a token is drawn from. In a crowd, once
        all have begun, no block is free until somebody has had to make room."""
        for index, length in enumerate(PROMPT_LENGTHS):
            params = SamplingParams(max_tokens=NUM_NEW, prompt_logprobs=0 if all_logits else None)
            request = Request(
                request_id=str(index),
                prompt_token_ids=self._token_ids[index][:length],
                params=params,
                max_tokens=NUM_NEW,
                seed=0,
            )
            scheduler.add_request(request)
        seen: set[tuple[int, int]] = set()
        largest = 0.0
        pool, taken = scheduler.kv_cache_manager.pool, list[int]()
        while scheduler.has_work:
            if is_crowded and not scheduler.waiting:
                taken += [pool.allocate() for _ in range(pool.num_free)]
            if scheduler.num_preemptions:
                pool.release(taken)
                taken.clear()
                is_crowded = False
            output = scheduler.schedule()
            rows = self._runner.execute(output)
            for sequence, num_tokens, num_logits in output.scheduled:
                index, end = int(sequence.request.request_id), sequence.num_computed_tokens + num_tokens
                right = self._expected[index][end - num_logits : end]
                largest = max(largest, _difference(rows[:num_logits], right))
                seen |= {(index, position) for position in range(end - num_logits, end)}
                rows = rows[num_logits:]
            assert len(rows) == 0
            for sequence, _ in scheduler.advance(output):
                scheduler.update(sequence, self._token_ids[int(sequence.request.request_id)][sequence.num_tokens])
        first = [0 if all_logits else length - 1 for length in PROMPT_LENGTHS]
        assert seen == {(i, p) for i, n in enumerate(PROMPT_LENGTHS) for p in range(first[i], n + NUM_NEW - 1)}
        return largest


def _difference(actual: Tensor, expected: Tensor) -> float:
    if not len(actual):
        return 0.0
    assert torch.equal(actual.argmax(dim=1), expected.argmax(dim=1)), "another token is the likeliest"
    return float((actual - expected).abs().max())


class Row(NamedTuple):
    """An architecture in the table of docs/models.md."""

    architecture: str
    way: str
    """A tier, and what is special about it; or that it is refused."""
    shares_prefixes: bool
    remark: str

    @property
    def rank(self) -> int:
        """Higher is better; 0: it is not served."""
        return _RANKS[self.way.partition(",")[0]]

    @property
    def markdown(self) -> str:
        return f"| {self.architecture} | {self.way} | {'yes' if self.shares_prefixes else ''} | {self.remark} |\n"


def sweep_row(architecture: str) -> Row:
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")  # of models about their configs
            make_tiny(architecture)
    except Exception as error:
        return Row(architecture, NOT_BUILT, False, _reason(error))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = sweep(architecture)
    except Exception as error:
        return Row(architecture, REFUSED, False, _reason(error))
    layers = ", ".join(f"{count} x {kind}" for kind, count in result.verdict.layers.items())
    return Row(architecture, str(result.verdict.way), result.num_cached_tokens > 0, layers)


def _reason(error: Exception) -> str:
    _, _, tried = str(error).partition("no way to run it gives the logits of a plain run ")
    text = tried.strip("()") or f"{type(error).__name__}: {error}"
    text = re.sub(r"\w+(?:LM|LMHeadModel|HeadModel|Generation|Decoder): |, so the engine would .*? yet", "", text)
    text = " ".join(text.split()).replace("|", "/")
    return text if len(text) <= _MOST_OF_A_REASON else text[: _MOST_OF_A_REASON - 1] + "…"


def documented_rows() -> dict[str, Row]:
    _, _, table = DOCUMENT.read_text(encoding="utf-8").partition(TABLE_MARK)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[4:]]
    return {name: Row(name, way, shares == "yes", remark) for name, way, shares, remark in cells}


def write_rows(rows: list[Row]) -> None:
    before, mark, _ = DOCUMENT.read_text(encoding="utf-8").partition(TABLE_MARK)
    counts = Counter(row.way.partition(",")[0] for row in rows)
    summary = f"{len(rows)} architectures: " + ", ".join(f"{counts[way]} {way}" for way in counts)
    head = "| architecture | tier | prefix cache | layers of the tiny model, or why not |\n| --- | --- | --- | --- |\n"
    text = before + mark + f"{summary}.\n\n" + head + "".join(row.markdown for row in rows)
    DOCUMENT.write_text(text, encoding="utf-8")
