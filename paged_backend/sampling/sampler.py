"""One token per sequence from one batch of logits, each by its own parameters."""

from __future__ import annotations

from typing import NamedTuple

import torch

from paged_backend.engine.request import Sequence
from paged_backend.sampling.candidates import take_rows
from paged_backend.sampling.choice import choose
from paged_backend.sampling.constraints import ConstrainedRow, Constraints, apply_constraints
from paged_backend.sampling.draw import Ints
from paged_backend.sampling.logprobs import Logprobs, token_logprobs
from paged_backend.sampling.penalties import PenalisedRow, TokenCounts, apply_penalties, has_penalties
from paged_backend.sampling.processors import Processors, run_processors

_PROMPT_ROWS = 64
"""Rows of prompt logits turned into log-probabilities at a time, to bound the memory it takes."""


class SampledToken(NamedTuple):
    token_id: int
    logprobs: Logprobs | None
    """Of the raw logits; None if not asked for."""


class _SamplingState:
    """What the sampler derives from one sequence and keeps with it; made anew from the tokens if it is not there."""

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        params = sequence.request.params
        self.constraints = Constraints(sequence.request, vocab_size)
        self.counts: TokenCounts | None = None
        if has_penalties(params):
            self.counts = TokenCounts(vocab_size, include_prompt=params.repetition_penalty != 1.0)
        self.processors = Processors(params.logits_processors) if params.logits_processors else None


class Sampler:
    """Chooses the next token of each sequence.

    A token is a function of the sequence's parameters, tokens and seed and of its row of logits alone: nothing that
    the other rows of the batch are or ask for changes it, in any bit. Order of operations: raw log-probabilities,
    float32, allowed ids, bad words, `min_tokens` and `logit_bias`, penalties, the caller's logits processors,
    temperature, `min_p`, `top_k`, `top_p`, draw.

    Where these ban every token of a row, the lowest of its `allowed_token_ids` is taken, or else token 0.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledToken | Exception]:
        """Row *i* of `logits` [S, V], of any float type and device, belongs to `sequences[i]`; may change `logits`.

        What a sequence's own logits processors raise comes in place of its token.
        """
        assert logits.shape == (len(sequences), self._vocab_size)
        if not sequences:
            return []
        asking = [row for row, sequence in enumerate(sequences) if sequence.request.params.logprobs is not None]
        raw = take_rows(logits, asking).float().log_softmax(dim=1) if asking else None
        logits = logits.float()
        constrained = self._process(logits, sequences)
        errors = self._run_processors(logits, sequences)
        tokens = choose(logits, sequences)
        if constrained:
            _replace_banned(tokens, logits, constrained)
        chosen: list[int] = tokens.tolist()
        logprobs: dict[int, Logprobs] = {}
        if raw is not None:
            logprobs = dict(zip(asking, _logprobs(raw, asking, chosen, sequences), strict=True))
        tokens_of_rows = (SampledToken(token_id, logprobs.get(row)) for row, token_id in enumerate(chosen))
        return [errors.get(row, token) for row, token in enumerate(tokens_of_rows)]

    @torch.inference_mode()
    def prompt_logprobs(self, logits: torch.Tensor, token_ids: list[int], num_logprobs: int) -> list[Logprobs]:
        """Row *t* of `logits` [T, V] predicts `token_ids[t]`; each token and the `num_logprobs` best (-1: all)."""
        result: list[Logprobs] = []
        for start in range(0, len(token_ids), _PROMPT_ROWS):
            ids = token_ids[start : start + _PROMPT_ROWS]
            log_probs = logits[start : start + _PROMPT_ROWS].float().log_softmax(dim=1)
            result += token_logprobs(log_probs, ids, [num_logprobs] * len(ids), [None] * len(ids))
        return result

    def _state(self, sequence: Sequence) -> _SamplingState:
        if not isinstance(sequence.sampling_state, _SamplingState):
            sequence.sampling_state = _SamplingState(sequence, self._vocab_size)
        return sequence.sampling_state

    def _process(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[ConstrainedRow]:
        """Applies constraints and penalties in place; returns the rows that have constraints."""
        constrained: list[ConstrainedRow] = []
        penalised: list[PenalisedRow] = []
        for row, sequence in enumerate(sequences):
            state = self._state(sequence)
            if state.constraints:
                banned = state.constraints.banned(sequence.token_ids, sequence.num_output_tokens)
                constrained.append(ConstrainedRow(row, state.constraints, banned))
            if state.counts is not None:
                state.counts.catch_up(sequence.token_ids, sequence.num_prompt_tokens)
                penalised.append(PenalisedRow(row, state.counts, sequence.request.params))
        if constrained:
            apply_constraints(logits, constrained)
        if penalised:
            apply_penalties(logits, penalised)
        return constrained

    def _run_processors(self, logits: torch.Tensor, sequences: list[Sequence]) -> dict[int, Exception]:
        """Runs the callers' own code, in place; what failed, by row. What must hold whatever a caller's code does (the
        syntax of an output) has its place after it."""
        states = ((row, sequence, self._state(sequence).processors) for row, sequence in enumerate(sequences))
        return run_processors(logits, [(row, one, own) for row, one, own in states if own is not None])


def _replace_banned(tokens: Ints, logits: torch.Tensor, constrained: list[ConstrainedRow]) -> None:
    """Where a banned token was chosen, all are banned, and the row's fallback is taken instead."""
    rows = [item.row for item in constrained]
    values = logits[rows, torch.from_numpy(tokens[rows]).to(logits.device)]
    for item, is_banned in zip(constrained, torch.isneginf(values).tolist(), strict=True):
        if is_banned:
            tokens[item.row] = item.constraints.fallback


def _logprobs(raw: torch.Tensor, asking: list[int], chosen: list[int], sequences: list[Sequence]) -> list[Logprobs]:
    params = [sequences[row].request.params for row in asking]
    nums = [item.logprobs or 0 for item in params]
    return token_logprobs(raw, [chosen[row] for row in asking], nums, [item.logprob_token_ids for item in params])
