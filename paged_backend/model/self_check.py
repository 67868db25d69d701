"""Before a model serves anybody: does running it our way give the logits of a plain run?"""

from __future__ import annotations

import itertools
from typing import Protocol

import torch
from torch import Tensor

from paged_backend.engine.kv_cache_manager import KVCacheManager
from paged_backend.engine.kv_layout import Reach
from paged_backend.engine.request import Request
from paged_backend.engine.scheduler import Scheduler, SchedulerOutput
from paged_backend.errors import ModelError
from paged_backend.sampling_params import SamplingParams

_LEAST_PROBE, _MOST_PROBE = 24, 72
_CHUNK = 7
_NUM_DECODED = 8
"""The last tokens of the second copy, computed one by one."""
# Two right runs differ by rounding. A wrong mask, position or state differs by the logits' own size.
_LARGEST_DIFFERENCE = {
    torch.float32: 1e-3,
    torch.bfloat16: 0.15,
    torch.float16: 0.05,
    torch.int8: 0.3,
    torch.float8_e4m3fn: 0.4,
    torch.float8_e5m2: 0.6,
}


class _Runner(Protocol):
    num_blocks: int
    reaches: tuple[Reach, ...]

    def execute(self, output: SchedulerOutput) -> Tensor: ...


def probe_token_ids(
    vocab_size: int, max_model_len: int, block_size: int, *, without: frozenset[int] = frozenset()
) -> list[int]:
    """Some ids, spread over the vocabulary; more than fit in a block, unless blocks are very large.

    Ids of `without`, such as padding, which some models treat as no tokens at all, are not among them.
    """
    length = min(max(_LEAST_PROBE, block_size + _CHUNK), _MOST_PROBE, max_model_len - 1)
    spread = ((7 + 7919 * i) % vocab_size for i in itertools.count())
    return list(itertools.islice((token_id for token_id in spread if token_id not in without), length))


def check_logits(
    runner: _Runner, token_ids: list[int], expected: Tensor, *, block_size: int, dtype: torch.dtype
) -> float:
    """Compute two copies of the probe in chunks and then token by token, in the same steps, and compare all logits.

    `expected` [T, V] comes from a plain forward of the model. `dtype` is the coarsest type on the way. Returns the
    difference; raises ModelError if it is more than rounding.
    """
    manager = KVCacheManager(
        runner.num_blocks,
        block_size,
        enable_prefix_caching=False,
        reaches=runner.reaches,
        max_step_tokens=_CHUNK,
    )
    scheduler = Scheduler(manager, max_num_seqs=2, max_num_batched_tokens=_CHUNK, max_model_len=len(token_ids) + 1)
    most = runner.num_blocks // (2 * len(runner.reaches)) * block_size  # so that neither copy has to make room
    length = min(len(token_ids), most)
    for copy, num_decoded in enumerate(_nums_decoded(length)):
        request = Request(
            request_id=str(copy),
            prompt_token_ids=token_ids[: length - num_decoded],
            params=SamplingParams(max_tokens=num_decoded + 1, prompt_logprobs=0),
            max_tokens=num_decoded + 1,
            seed=0,
        )
        scheduler.add_request(request)
    differences = []
    while scheduler.has_work:
        output = scheduler.schedule()
        rows = runner.execute(output)
        for sequence, num_tokens, _ in output.scheduled:
            # Asking for prompt log-probabilities makes the scheduler want the logits of every token.
            wanted = expected[sequence.num_computed_tokens :][:num_tokens]
            differences.append(_difference(rows[:num_tokens], wanted))
            rows = rows[num_tokens:]
        for sequence, _ in scheduler.advance(output):
            scheduler.update(sequence, [*token_ids, 0][sequence.num_tokens])
    largest = float(torch.stack(differences).max() / expected.std().clamp_min(1e-6))
    limit = _LARGEST_DIFFERENCE[dtype]
    if not largest <= limit:
        raise ModelError(
            f"it differs from a plain run by {largest:.2g} standard deviations of the logits "
            f"(at most {limit:g} would be rounding)"
        )
    return largest


def _nums_decoded(length: int) -> tuple[int, int]:
    """How many tokens of each copy are computed one by one: so many that the first one is still at it, and some tokens
    ahead, when the second one begins."""
    second = min(_NUM_DECODED, length - 1)
    num_steps = -(-(length - second) // (_CHUNK - 1))
    return min(num_steps + second - 3, length - 1) if second > 3 else second, second


def _difference(actual: Tensor, expected: Tensor) -> Tensor:
    """The largest root mean square difference of a token's logits."""
    return (actual.float() - expected.float()).square().mean(dim=1).sqrt().max()
