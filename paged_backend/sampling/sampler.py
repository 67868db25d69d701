"""One token per sequence from one batch of logits, each by its own parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch

import paged_kernels
from paged_backend.engine.request import Sequence
from paged_backend.sampling.choice import choose
from paged_backend.sampling.constraints import ConstrainedRow, Constraints, apply_constraints
from paged_backend.sampling.grammar import GrammarMatcher
from paged_backend.sampling.grammar_rows import GrammarRows, Verdict
from paged_backend.sampling.logprobs import Logprobs, LogprobsOnDevice, token_logprobs
from paged_backend.sampling.penalties import PenalisedRow, TokenCounts, apply_penalties, has_penalties
from paged_backend.sampling.processors import Processors, run_processors
from paged_backend.sampling.thinking import ThinkingBudget, force_tokens
from paged_kernels.transfers import HostCopies, on_device, to_device

_PROMPT_ROWS = 64
"""Rows of prompt logits turned into log-probabilities at a time, to bound the memory it takes."""
_FREE = Verdict()
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class SampledToken(NamedTuple):
    token_id: int
    logprobs: Logprobs | None
    """Of the raw logits; None if not asked for."""
    is_complete: bool = False
    """With this token the output is all that its grammar allows."""


class _SamplingState:
    """What the sampler derives from one sequence and keeps with it; made anew from the tokens if it is not there."""

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        params = sequence.request.params
        self.constraints = Constraints(sequence.request, vocab_size)
        grammar = sequence.request.grammar
        self.matcher: GrammarMatcher | None = None if grammar is None else grammar.matcher()
        self.counts: TokenCounts | None = None
        if has_penalties(params):
            self.counts = TokenCounts(vocab_size, include_prompt=params.repetition_penalty != 1.0)
        self.processors = Processors(params.logits_processors) if params.logits_processors else None
        self.thinking: ThinkingBudget | None = None
        marks, budget = sequence.request.markup.reasoning, params.thinking_token_budget
        if marks is not None and budget is not None:
            self.thinking = ThinkingBudget(marks, budget, sequence.num_prompt_tokens)
        derived = (self.matcher, self.counts, self.processors, self.thinking)
        self.needs_tokens = self.constraints.need_tokens or any(part is not None for part in derived)
        """Whether what is done to its logits depends on its tokens, and not on their number alone."""
        self.changes_logits = self.needs_tokens or bool(self.constraints)


class _Row(NamedTuple):
    """A row of the logits that is changed before the draw."""

    row: int
    sequence: Sequence
    state: _SamplingState


class Draws:
    """A token per row that the device draws, with log-probabilities for some rows."""

    def __init__(self, tokens: torch.Tensor, asking: list[int], logprobs: LogprobsOnDevice | None) -> None:
        """Rows `asking` have log-probabilities."""
        self.tokens = tokens
        self._asking, self._logprobs = asking, logprobs
        self._copies = HostCopies([tokens])

    def result(self) -> list[SampledToken]:
        """Waits for the device."""
        (tokens,) = self._copies.wait()
        chosen: list[int] = tokens.tolist()
        sampled = [SampledToken(token_id, None) for token_id in chosen]
        if self._logprobs is not None:
            logprobs = self._logprobs.result([chosen[row] for row in self._asking])
            for row, of_row in zip(self._asking, logprobs, strict=True):
                sampled[row] = SampledToken(chosen[row], of_row)
        return sampled


def _on_their_device(
    method: Callable[Concatenate[Any, torch.Tensor, _Parameters], _Result],
) -> Callable[Concatenate[Any, torch.Tensor, _Parameters], _Result]:
    """What the method launches is on the device of the logits, its first argument, and needs no gradients."""

    @functools.wraps(method)
    def run(self: Any, logits: torch.Tensor, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        with torch.inference_mode(), on_device(logits.device):
            return method(self, logits, *args, **kwargs)

    return run


class Sampler:
    """Chooses the next token of each sequence.

    A token is a function of the sequence's parameters, tokens and seed and of its row of logits alone: nothing that
    the other rows of the batch are or ask for changes it, in any bit. Order of operations: raw log-probabilities,
    float32, grammar, allowed ids, bad words, `min_tokens` and `logit_bias`, penalties, the caller's logits processors,
    temperature, `min_p`, `top_k`, `top_p`, draw. A grammar holds whatever the caller's processors do, and the end of
    the reasoning, once its budget is spent, is forced whatever all of these say.

    Where these ban every token of a row, the most likely one that its grammar allows is taken; without a grammar, the
    lowest of its `allowed_token_ids`, or else token 0.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    @_on_their_device
    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledToken | Exception]:
        """Row *i* of `logits` [S, V], of any float type and device, belongs to `sequences[i]`; may change `logits`.

        What a sequence's own logits processors raise, and a grammar that it cannot follow, come in place of its token.
        """
        assert logits.shape == (len(sequences), self._vocab_size)
        if not sequences:
            return []
        asking = _asking(sequences)
        raw = logits
        rows = self._rows(sequences)
        if rows:
            logits = logits.to(torch.float32, copy=bool(asking))
        grammars = GrammarRows((row, one, state.matcher) for row, one, state in rows if state.matcher is not None)
        grammars.mask(logits)
        constrained = _process(logits, rows)
        errors = _run_processors(logits, rows)
        if any(state.processors is not None for _, _, state in rows):
            grammars.mask(logits)  # which has the last word
        _force(logits, rows)
        tokens = choose(logits, sequences)
        _replace_banned(tokens, logits, constrained)
        chosen: list[int] = tokens.tolist()
        sampled: list[SampledToken | Exception] = [SampledToken(token_id, None) for token_id in chosen]
        verdicts = grammars.advance(chosen)
        logprobs: dict[int, Logprobs] = {}
        if asking:
            of_asking = [chosen[row] for row in asking]
            launched = _logprobs(raw, asking, torch.tensor(of_asking, device=raw.device), sequences)
            logprobs = dict(zip(asking, launched.result(of_asking), strict=True))
        for row in verdicts.keys() | logprobs.keys():
            is_complete, error = verdicts.get(row, _FREE)
            sampled[row] = error or SampledToken(chosen[row], logprobs.get(row), is_complete)
        for row, failure in errors.items():
            sampled[row] = failure
        return sampled

    @_on_their_device
    def start(self, logits: torch.Tensor, sequences: list[Sequence]) -> Draws | None:
        """What `sample` does, launched; None if that takes tokens that have to be known, or has to wait for more."""
        rows = self._rows(sequences)
        if any(state.needs_tokens for _, _, state in rows):
            return None
        asking, raw = _asking(sequences), logits
        if rows:
            logits = logits.to(torch.float32, copy=bool(asking))
        constrained = _process(logits, rows)
        tokens = choose(logits, sequences)
        _replace_banned(tokens, logits, constrained)
        logprobs = _logprobs(raw, asking, _rows_of(tokens, asking), sequences) if asking else None
        return Draws(tokens, asking, logprobs)

    @_on_their_device
    def candidates(
        self, logits: torch.Tensor, sequences: list[Sequence], nums: list[int]
    ) -> list[list[tuple[int, float]]]:
        """For beam search: the `nums[i]` best tokens of row *i* and their log-probabilities, best first.

        Constraints and penalties are applied to the log-probabilities, as transformers does; banned tokens are left
        out, so that there may be fewer.
        """
        log_probs = logits.float().log_softmax(dim=1)
        _process(log_probs, self._rows(sequences))
        num_best = min(max(nums, default=0), self._vocab_size)
        some_token = torch.zeros(len(nums), dtype=torch.int64, device=logits.device)
        _, _, best_values, best_ids = paged_kernels.best_logits(log_probs, some_token, num_best)
        rows = zip(best_ids.tolist(), best_values.tolist(), nums, strict=True)
        return [
            [(token_id, value) for token_id, value in zip(ids[:num], values[:num], strict=True) if value > -math.inf]
            for ids, values, num in rows
        ]

    @_on_their_device
    def prompt_logprobs(self, logits: torch.Tensor, token_ids: list[int], num_logprobs: int) -> list[Logprobs]:
        """Row *t* of `logits` [T, V] predicts `token_ids[t]`; each token and the `num_logprobs` best (-1: all)."""
        result: list[Logprobs] = []
        for start in range(0, len(token_ids), _PROMPT_ROWS):
            ids = token_ids[start : start + _PROMPT_ROWS]
            rows = logits[start : start + _PROMPT_ROWS]
            result += token_logprobs(rows, ids, [num_logprobs] * len(ids), [None] * len(ids))
        return result

    def _rows(self, sequences: list[Sequence]) -> list[_Row]:
        """Those whose logits are changed, with what was derived from each, now if it was not before."""
        rows: list[_Row] = []
        for row, sequence in enumerate(sequences):
            state: _SamplingState | None = sequence.sampling_state
            if state is None:
                state = sequence.sampling_state = _SamplingState(sequence, self._vocab_size)
            if state.changes_logits:
                rows.append(_Row(row, sequence, state))
        return rows


def _process(logits: torch.Tensor, rows: list[_Row]) -> list[ConstrainedRow]:
    """Applies constraints and penalties in place; returns the rows in which everything may come to be banned."""
    constrained: list[ConstrainedRow] = []
    penalised: list[PenalisedRow] = []
    for row, sequence, state in rows:
        if state.constraints or state.processors is not None:
            num_output_tokens = sequence.num_drawn_tokens - sequence.num_prompt_tokens
            banned = state.constraints.banned(sequence.token_ids, num_output_tokens)
            # Asked for now, while the row is what its grammar made of it.
            fallback = state.constraints.fallback if state.matcher is None else int(logits[row].argmax())
            constrained.append(ConstrainedRow(row, state.constraints, banned, fallback))
        if state.counts is not None:
            state.counts.catch_up(sequence.token_ids, sequence.num_prompt_tokens)
            penalised.append(PenalisedRow(row, state.counts, sequence.request.params))
    if constrained:
        apply_constraints(logits, constrained)
    if penalised:
        apply_penalties(logits, penalised)
    return constrained


def _run_processors(logits: torch.Tensor, rows: list[_Row]) -> dict[int, Exception]:
    """Runs the callers' own code, in place; what failed, by row."""
    return run_processors(logits, [(row, one, state.processors) for row, one, state in rows if state.processors])


def _force(logits: torch.Tensor, rows: list[_Row]) -> None:
    """Where enough was thought, the end of the reasoning comes next."""
    forced: dict[int, int] = {}
    for row, sequence, state in rows:
        if state.thinking is not None and (token_id := state.thinking.next_token(sequence.token_ids)) is not None:
            forced[row] = token_id
    if forced:
        force_tokens(logits, forced)


def _replace_banned(tokens: torch.Tensor, logits: torch.Tensor, constrained: list[ConstrainedRow]) -> None:
    """Where a banned token was chosen, all are banned, and the row's fallback is taken instead."""
    if not constrained:
        return
    rows = to_device(np.array([item.row for item in constrained]), logits.device)
    fallbacks = to_device(np.array([item.fallback for item in constrained]), logits.device)
    chosen = tokens[rows]
    tokens[rows] = torch.where(torch.isneginf(logits[rows, chosen]), fallbacks, chosen)


def _asking(sequences: list[Sequence]) -> list[int]:
    """The rows that want log-probabilities."""
    return [row for row, sequence in enumerate(sequences) if sequence.request.params.logprobs is not None]


def _logprobs(
    raw: torch.Tensor, asking: list[int], chosen: torch.Tensor, sequences: list[Sequence]
) -> LogprobsOnDevice:
    """Of the rows that ask, which have chosen these tokens."""
    params = [sequences[row].request.params for row in asking]
    nums = [item.logprobs or 0 for item in params]
    return LogprobsOnDevice(_rows_of(raw, asking), chosen, nums, [item.logprob_token_ids for item in params])


def _rows_of(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    if len(rows) == len(tensor):
        return tensor
    return tensor[to_device(np.array(rows), tensor.device)]
