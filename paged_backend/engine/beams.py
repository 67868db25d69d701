"""The live beams of a request: how they wait for each other, fork, end, and become its outputs."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_

from paged_backend.engine.beam_search import Continuation, Hypothesis
from paged_backend.engine.request import FinishReason, Request, Sequence, Status
from paged_backend.engine.scheduler import Scheduler


def move_on(request: Request, scheduler: Scheduler) -> bool:
    """Select the next beams, if all live ones have named their candidates; True if that was the end of the search.

    A beam goes on as the first of its continuations, others fork from it, and a beam without any ends.
    """
    search, live = request.beam_search, request.sequences
    assert search is not None
    candidates = [beam.candidates for beam in live if beam.candidates is not None]
    if len(candidates) < len(live):
        return False
    selected = search.select([beam.output_token_ids for beam in live], candidates)
    if selected:
        request.sequences = _next_beams(request, selected, scheduler)
    else:
        conclude(request, scheduler, FinishReason.STOP)
    return not selected


def conclude(request: Request, scheduler: Scheduler, reason: FinishReason) -> None:
    """Make the best hypotheses the request's sequences, all of them finished.

    Live beams are hypotheses too if they cannot go on, for which `reason` is the reason: the request is aborted, or no
    token was allowed to come next, so that there is nothing better.
    """
    search = request.beam_search
    assert search is not None
    if reason is FinishReason.ABORT or not search.hypotheses:
        for beam, logprob in zip(request.sequences, search.logprobs, strict=True):
            search.add(Hypothesis(beam.output_token_ids, logprob, 0.0))
    scheduler.finish_all(request.sequences, reason)
    num_cached_tokens = request.sequences[0].num_cached_tokens
    best = search.hypotheses[: request.params.n]
    results = [_finished(request, index, item, reason) for index, item in enumerate(best)]
    results[0].num_cached_tokens = num_cached_tokens
    request.sequences = results  # at once: readers look at it


def _next_beams(request: Request, selected: Sequence_[Continuation], scheduler: Scheduler) -> list[Sequence]:
    """The sequences that go on with the selected tokens, in this order."""
    live = request.sequences
    parents = [live[item.parent] for item in selected]
    for beam in live:
        if beam not in parents:
            scheduler.finish(beam, FinishReason.ABORT)
    free_indices = sorted(set(range(len(selected))) - {beam.index for beam in parents}, reverse=True)
    beams: list[Sequence] = []
    for parent in parents:  # all forks come before a parent gets its own next token
        beam = parent
        if parent in beams:
            beam = Sequence(request, free_indices.pop())
            scheduler.fork(parent, beam)
        beams.append(beam)
    for beam, item in zip(beams, selected, strict=True):
        beam.token_ids.append(item.token_id)
        scheduler.resume(beam)
    return beams


def _finished(request: Request, index: int, hypothesis: Hypothesis, reason: FinishReason) -> Sequence:
    sequence = Sequence(request, index)
    sequence.token_ids = request.prompt_token_ids + hypothesis.token_ids
    sequence.hypothesis = hypothesis
    sequence.status, sequence.finish_reason = Status.FINISHED, reason
    last = sequence.token_ids[-1]
    if hypothesis.token_ids and last in request.end_token_ids:
        sequence.finish_reason = FinishReason.STOP
        sequence.stop_reason = last if last in request.stop_token_ids else None
    elif len(hypothesis.token_ids) >= request.max_tokens:
        sequence.finish_reason = FinishReason.LENGTH
    return sequence
