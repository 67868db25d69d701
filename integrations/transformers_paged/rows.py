"""What the engine is asked for each row of a `generate` call, with transformers' own processors where needed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import logits_process

from paged_backend import SamplingParams
from transformers_paged.call import Call

_NATIVE = {
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
}
"""The engine's sampler does what these do."""
_TEMPERATURES = (0.01, 2.0)
"""What the engine takes as it is."""
_MOST_SEEDS = 2**63 - 1


class Row:
    """One row's logits on their way to a token, through transformers' processors, in the engine's thread.

    Transformers' processors see the padded row, with the padding on its left, as they do in transformers' own loop.
    """

    def __init__(self, input_ids: Tensor, processors: Sequence[Any], *, keep_logits: bool, keep_scores: bool) -> None:
        self._input_ids = input_ids
        self._processors = processors
        self._keep_logits, self._keep_scores = keep_logits, keep_scores
        self.logits: dict[int, Tensor] = {}
        """By number of the token, [V], before the processors; empty unless wanted."""
        self.scores: dict[int, Tensor] = {}
        """The same after the processors."""
        self.error: Exception | None = None
        """What one of the processors raised."""

    def __call__(self, token_ids: list[int], logits: Tensor) -> Tensor:
        """`logits` [V] of the token that follows `token_ids`, the output so far -> the same, processed."""
        device = self._input_ids.device
        scores = logits[None].to(device)
        if self._keep_logits:
            self.logits[len(token_ids)] = scores[0].clone()
        new_ids = torch.tensor([token_ids], dtype=torch.long, device=device)
        input_ids = torch.cat([self._input_ids, new_ids], dim=1)
        try:
            for processor in self._processors:
                scores = processor(input_ids, scores)
        except Exception as error:
            self.error = error
            raise
        if self._keep_scores:
            self.scores[len(token_ids)] = scores[0].clone()
        return scores[0]


def sampling_params(model: PreTrainedModel, call: Call) -> tuple[list[SamplingParams], list[Row]]:
    """Parameters of each row, and the row itself if transformers' processors are at work (else the list is empty)."""
    base = SamplingParams(
        temperature=1.0 if call.config.do_sample else 0.0,
        max_tokens=call.max_new_tokens,
        ignore_eos=True,
        stop_token_ids=in_vocabulary(model, call.eos_token_ids),
        detokenize=False,
    )
    rows: list[Row] = []
    if (native := native_params(model, call)) is not None:
        params = [base.replace(**native)] * call.num_rows
    else:
        rows = [_row(model, call, row) for row in range(call.num_rows)]
        params = [base.replace(logits_processors=[row]) for row in rows]
    if call.config.do_sample:
        # From torch's generator, so that torch.manual_seed() decides here as it does in transformers.
        seeds = torch.randint(_MOST_SEEDS, (call.num_rows,)).tolist()
        params = [one.replace(seed=seed) for one, seed in zip(params, seeds, strict=True)]
    return params, rows


def in_vocabulary(model: PreTrainedModel, token_ids: frozenset[int]) -> list[int]:
    """Others are never generated."""
    vocab_size = model.config.get_text_config().vocab_size
    return sorted(token_id for token_id in token_ids if 0 <= token_id < vocab_size)


def native_params(model: PreTrainedModel, call: Call) -> dict[str, Any] | None:
    """The processors of the call in the engine's own parameters, or None if these cannot say the same."""
    config = call.config
    if call.logits_processor or call.prefix_allowed_tokens_fn:
        return None
    if call.captures("output_scores") or call.captures("output_logits"):
        return None
    processors = _processors(model, call, 0)
    if not all(type(processor) in _NATIVE for processor in processors):
        return None
    params: dict[str, Any] = {"repetition_penalty": config.repetition_penalty or 1.0}
    min_length = (config.min_length or 0) - call.prompts.shape[1]
    if min_length > 0 and call.eos_token_ids:
        if not _engine_bans(model, call.eos_token_ids):
            return None
        params["min_tokens"] = min(min_length, call.max_new_tokens)
    return params if not config.do_sample else _native_sampling(config, params)


def _native_sampling(config: GenerationConfig, params: dict[str, Any]) -> dict[str, Any] | None:
    temperature = 1.0 if config.temperature is None else config.temperature
    top_p = 1.0 if config.top_p is None else config.top_p
    if not _TEMPERATURES[0] <= temperature <= _TEMPERATURES[1] or top_p <= 0.0:
        return None
    if config.min_p and top_p < 1.0:
        return None  # the engine takes min_p first, transformers top_p
    return params | {
        "temperature": float(temperature),
        "top_k": config.top_k or 0,
        "top_p": float(min(top_p, 1.0)),
        "min_p": float(config.min_p or 0.0),
    }


def _engine_bans(model: PreTrainedModel, eos_token_ids: frozenset[int]) -> bool:
    """Whether `min_tokens` bans these and no others: it always bans the model's own end tokens."""
    own = model.generation_config.eos_token_id
    return own is not None and eos_token_ids.issuperset([own] if isinstance(own, int) else own)


def _row(model: PreTrainedModel, call: Call, row: int) -> Row:
    return Row(
        _left_padded(call, call.prompt_of(row))[0],
        _processors(model, call, row),
        keep_logits=call.captures("output_logits"),
        keep_scores=call.captures("output_scores"),
    )


def _left_padded(call: Call, prompt: int) -> tuple[Tensor, Tensor]:
    """Ids and mask [1, L] of one prompt with its padding moved to the left."""
    mask = call.mask[prompt] != 0
    order = torch.argsort(mask.int(), stable=True)
    return call.prompts[prompt][order][None], mask[order][None].long()


def _processors(model: PreTrainedModel, call: Call, row: int) -> list[Any]:
    """Transformers' processors for one row, made for it alone; the caller's own are shared by all rows."""
    prompt = call.prompt_of(row)
    input_ids, mask = _left_padded(call, prompt)
    config = copy.copy(call.config)
    config.num_return_sequences = 1
    allowed = call.prefix_allowed_tokens_fn
    processors: list[Any] = model._get_logits_processor(
        config,
        input_ids_seq_length=input_ids.shape[1],
        encoder_input_ids=input_ids,
        prefix_allowed_tokens_fn=allowed and (lambda _, ids: allowed(prompt, ids)),
        logits_processor=list(call.logits_processor),
        device=input_ids.device,
        model_kwargs={"attention_mask": mask},
    )
    return processors
