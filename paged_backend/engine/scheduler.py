"""Which sequences compute how many tokens in the next step, and what becomes of them after it."""

from __future__ import annotations

import bisect
import dataclasses
import operator
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from paged_backend.engine.kv_cache_manager import BlockCopy, KVCacheManager, Swaps
from paged_backend.engine.request import FinishReason, Request, Sequence, Status
from paged_backend.engine.speculation import Speculator
from paged_backend.engine.step_budget import StepBudget
from paged_backend.engine.stopping import num_left_of, stop_after

_order = operator.attrgetter("order")


class OutOfDeviceMemoryError(Exception):
    """A runner's device has no memory for a step. The step's swaps to host memory were made, and no sequence's state
    is of any use."""


class ScheduledSequence(NamedTuple):
    """A sequence computes its next `num_tokens` tokens; the logits of the last `num_logits` of them are wanted.

    If it has draft tokens, these are the last ones, and the logits before and after each of them are wanted.
    """

    sequence: Sequence
    num_tokens: int
    num_logits: int

    @property
    def token_ids(self) -> list[int]:
        """What is computed; a token that is not known yet is its sequence's `pending_id`."""
        sequence, first = self.sequence, self.sequence.num_computed_tokens
        known = sequence.token_ids[first : first + self.num_tokens]
        return known + sequence.draft_token_ids if known else [sequence.pending_id]


@dataclasses.dataclass(slots=True)
class SchedulerOutput:
    """One step's work. The runner makes the swaps to host memory, the copies and the swaps from host memory, then
    computes the sequences in this order."""

    scheduled: list[ScheduledSequence] = dataclasses.field(default_factory=list)
    copies: list[BlockCopy] = dataclasses.field(default_factory=list)
    swaps: Swaps = dataclasses.field(default_factory=lambda: Swaps([], []))
    admitted: list[Sequence] = dataclasses.field(default_factory=list)
    """Those of `scheduled` that waited before."""
    preempted: list[Sequence] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    pools: bool = False
    """Whether one of them wants an embedding; those want no logits."""
    pending_tokens: Any = None
    """The sampler's: what the step before has drawn, for sequences with a token that is not known yet."""
    is_held_up: bool = False
    """Somebody has to make room. Who that is depends on tokens that are not known yet: the next step waits for them."""


class SampledSequence(NamedTuple):
    """A sequence gets its next token from this row of the step's logits."""

    sequence: Sequence
    row: int


class Scheduler:
    """Keeps who runs and who waits.

    There is no prefill phase and no decode phase: each step hands out up to `max_num_batched_tokens` tokens, first to
    running sequences, then to waiting ones, until each sequence's computed tokens have caught up with its tokens. A
    waiting sequence is admitted only if all of its tokens fit. When blocks run out, the newest sequence of the lowest
    priority is preempted: it gives its blocks back, keeps its tokens and waits to get what it had computed back from
    host memory, or to compute it again. The oldest one of the highest priority always goes on.

    Parked beams compute nothing. They keep their blocks for the beams that will fork from them, unless the room is
    needed; those that had to make room are in neither list until `resume`.

    With a speculator, sequences that compute their newest token may compute guesses at the next ones too, if budget and
    free blocks are left when everybody else has theirs. `advance` gives the row that the next token is drawn from; each
    time that it turns out to be the one guessed, `accept` counts the guess as computed and gives the row after it.

    A sequence may have one token that was drawn and is not known yet: it is computed like any other, unless it is the
    last one allowed. Its block is published once it is known, and nobody is preempted before it is.

    Both lists are sorted by priority, then arrival.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_adapters: int | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        assert max_num_batched_tokens <= kv_cache_manager.layout.max_step_tokens
        self.kv_cache_manager = kv_cache_manager
        self.max_num_seqs = max_num_seqs
        self.budget = StepBudget(max_num_batched_tokens)
        self.max_adapters = max_adapters
        """Most different LoRA adapters in one step."""
        self.max_len = min(max_model_len, kv_cache_manager.num_slots)
        """Most tokens of one sequence: the model's limit, or what the whole cache holds."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_draft_tokens = 0
        self.num_drafts = 0
        self.num_accepted_by_position: list[int] = []
        """Draft tokens that were right, by their place in their draft."""
        self._speculator = speculator
        self._num_arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add_request(self, request: Request) -> None:
        for sequence in request.sequences:
            sequence.order = (request.priority, self._num_arrivals, sequence.index)
        self._num_arrivals += 1
        bisect.insort(self.waiting, request.sequences[0], key=_order)

    def schedule(self) -> SchedulerOutput:
        """What the next step computes; nothing, if that depends on tokens that are not known yet."""
        output = SchedulerOutput(swaps=self.kv_cache_manager.begin_step())
        has_room = self._schedule_running(output)
        if has_room:
            self._schedule_waiting(output)
        while not output.scheduled and self.running and not self._are_tokens_pending():
            # All who run are parked, and the first one who waits has no room beside them.
            self._preempt(self.running.pop(), output)
            self._schedule_waiting(output)
        if self._speculator is not None and has_room:
            self._schedule_drafts(output, self._speculator)
        return output

    def _schedule_running(self, output: SchedulerOutput) -> bool:
        """Give running sequences their tokens, oldest first; False if the newest had to make room, or will have to."""
        index = 0
        most = self.budget.num_tokens
        while index < len(self.running) and output.num_tokens < most:
            if len(output.scheduled) == self.max_num_seqs:  # beams that were parked when others were admitted
                break
            sequence = self.running[index]
            if sequence.is_parked:
                index += 1
                continue
            num_pending = sequence.num_pending_tokens
            if num_pending and num_left_of(sequence, self.max_len) <= num_pending:
                index += 1  # it has drawn its last one
                continue
            num_tokens = len(sequence.token_ids) + num_pending - sequence.num_computed_tokens
            if num_tokens > 1:
                num_tokens = min(num_tokens, most - output.num_tokens)
            end = sequence.num_computed_tokens + num_tokens
            if end >= sequence.block_end:
                # What a token filled that was not known then, before the sequence may give it back.
                self.kv_cache_manager.publish(sequence, sequence.num_computed_tokens)
                copies = self.kv_cache_manager.allocate_slots(sequence, num_tokens)
                if copies is None:
                    if self._are_tokens_pending():
                        output.is_held_up = True
                        return False
                    # The last one in the list is never one that this step has scheduled already.
                    self._preempt(self.running.pop(), output)
                    continue
                output.copies += copies
                self.kv_cache_manager.publish(sequence, end - num_pending)
            _add(output, sequence, num_tokens, end)
            index += 1
        return not output.preempted

    def _are_tokens_pending(self) -> bool:
        return any(sequence.num_pending_tokens for sequence in self.running)

    def _schedule_waiting(self, output: SchedulerOutput) -> None:
        while self.waiting and self._has_place():
            budget = self.budget.num_tokens - output.num_tokens
            sequence = self.waiting[0]
            if budget == 0 or sequence.num_pending_tokens or not self._adapter_fits(sequence):
                return
            if not self.kv_cache_manager.admit(sequence):
                return
            del self.waiting[0]
            self._admitted(sequence)
            output.admitted.append(sequence)
            num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
            end = sequence.num_computed_tokens + num_tokens
            self.kv_cache_manager.publish(sequence, end)
            _add(output, sequence, num_tokens, end)

    def _has_place(self) -> bool:
        """Whether one more may run. Parked beams need no place in a step."""
        if len(self.running) < self.max_num_seqs:
            return True
        return sum(not sequence.is_parked for sequence in self.running) < self.max_num_seqs

    def _adapter_fits(self, sequence: Sequence) -> bool:
        """Whether those who run leave room for its adapter. If not, who is behind it waits too, so that it gets one."""
        adapter = sequence.request.adapter
        if adapter is None or self.max_adapters is None:
            return True
        running = {one.request.adapter.adapter_id for one in self.running if one.request.adapter is not None}
        return adapter.adapter_id in running or len(running) < self.max_adapters

    def _schedule_drafts(self, output: SchedulerOutput, speculator: Speculator) -> None:
        """Let sequences that compute just their newest token compute guesses at the next ones with it."""
        decoding = [
            index
            for index, (sequence, num_tokens, num_logits) in enumerate(output.scheduled)
            if num_tokens == num_logits == 1 and sequence.num_output_tokens > 0 and not sequence.request.beam_search
        ]
        sequences = [output.scheduled[index].sequence for index in decoding]
        limits = [num_left_of(sequence, self.max_len) - 1 for sequence in sequences]
        num_rows = output.num_tokens
        for number, drafts in speculator.drafts(sequences, limits, num_rows, self.budget.num_tokens):
            sequence = sequences[number]
            num_drafts = self.kv_cache_manager.allocate_drafts(sequence, 1, len(drafts))
            sequence.draft_token_ids = drafts[:num_drafts]
            output.scheduled[decoding[number]] = ScheduledSequence(sequence, 1 + num_drafts, 1 + num_drafts)
            output.num_tokens += num_drafts
            self.num_draft_tokens += num_drafts
            self.num_drafts += num_drafts > 0

    def _admitted(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        bisect.insort(self.running, sequence, key=_order)
        metrics = sequence.request.metrics
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = time.monotonic()
            sequence.num_cached_tokens = sequence.num_computed_tokens

    def _preempt(self, sequence: Sequence, output: SchedulerOutput) -> None:
        self.kv_cache_manager.preempt(sequence)
        output.preempted.append(sequence)
        self._wait_again(sequence)
        sequence.request.metrics.num_preemptions += 1
        self.num_preemptions += 1

    def _wait_again(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        if not sequence.is_parked:
            bisect.insort(self.waiting, sequence, key=_order)

    def resume(self, sequence: Sequence) -> None:
        """A beam that was parked has a token to compute."""
        if sequence.is_parked:
            sequence.candidates = None
            if sequence.status is Status.WAITING:
                self._wait_again(sequence)

    def advance(self, output: SchedulerOutput) -> list[SampledSequence]:
        """The step is computed: returns who samples a token, and from which row of its logits.

        Requests that want several samples fork here, so that the prompt was computed once.
        """
        self.kv_cache_manager.end_step()
        self.budget.step_computed()
        sampled: list[SampledSequence] = []
        row = -1
        for sequence, num_tokens, num_logits in output.scheduled:
            num_drafts = len(sequence.draft_token_ids)
            sequence.num_computed_tokens += num_tokens - num_drafts
            row += num_logits
            if sequence.num_computed_tokens < len(sequence.token_ids):
                continue
            if sequence.request.max_tokens == 0:
                self.finish_all(sequence.request.sequences, FinishReason.LENGTH)
            elif sequence.is_unforked:
                for sibling in sequence.request.sequences[1:]:
                    self.fork(sequence, sibling)
                sampled += [SampledSequence(sibling, row) for sibling in sequence.request.sequences]
            else:
                sampled.append(SampledSequence(sequence, row - num_drafts))
        return sampled

    def retry_with_less(self, output: SchedulerOutput) -> bool:
        """The device had no memory for the step: all is as if it had not been scheduled, and the next ones have fewer
        tokens. False, and nothing changed, if this one had a single token.

        Sequences whose computed tokens may have suffered wait to begin anew: those with a block that the step was to
        copy, with a state of their own or with a sum over their tokens.
        """
        if output.num_tokens == 1:
            return False
        self.kv_cache_manager.unpublish_step()
        self.budget.ran_out(output.num_tokens)
        admitted, targets = set(output.admitted), {copy.target for copy in output.copies}
        for sequence, _, _ in reversed(output.scheduled):
            if sequence.draft_token_ids:
                sequence.draft_token_ids = []
                self.kv_cache_manager.trim(sequence)
            sequence.block_end = 0
            has_more = sequence.model_state is not None or sequence.request.pooling is not None
            if has_more or not targets.isdisjoint(sequence.held_blocks):
                self.kv_cache_manager.free(sequence)
            elif sequence in admitted:
                self.kv_cache_manager.withdraw(sequence)
            else:
                continue
            self.running.remove(sequence)
            self._wait_again(sequence)
        return True

    def accept(self, sampled: list[SampledSequence], position: int = 0) -> list[SampledSequence]:
        """These have got a token, in the place of the guess at `position`: returns those of them whose guess it was,
        who draw the next one from the next row.

        The others are done with this step, and what room their guesses had is free again.
        """
        going_on: list[SampledSequence] = []
        for sequence, row in sampled:
            drafts = sequence.draft_token_ids
            if not drafts:
                continue
            if drafts.pop(0) == sequence.token_ids[-1] and sequence.finish_reason is not FinishReason.ERROR:
                self._count_accepted(position)
                if sequence.status is Status.RUNNING:
                    sequence.num_computed_tokens += 1
                    self.kv_cache_manager.publish(sequence, sequence.num_computed_tokens)
                    going_on.append(SampledSequence(sequence, row + 1))
                    continue
            drafts.clear()
            self.kv_cache_manager.trim(sequence)
        return going_on

    def _count_accepted(self, position: int) -> None:
        counts = self.num_accepted_by_position
        counts += [0] * (position + 1 - len(counts))
        counts[position] += 1

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child goes on from the parent's tokens: beside it, in the same blocks, or else as one that waits."""
        child.token_ids = list(parent.token_ids)
        child.num_cached_tokens = parent.num_cached_tokens
        child.order = (*parent.order[:2], child.index)
        if parent.status is Status.RUNNING and self._has_place():
            self.kv_cache_manager.fork(parent, child)
            child.status = Status.RUNNING
            bisect.insort(self.running, child, key=_order)
        else:
            self._wait_again(child)

    def update(self, sequence: Sequence, token_id: int, *, is_complete: bool = False) -> None:
        """Append a sampled token, and finish the sequence if it was its last, or if nothing may follow."""
        sequence.token_ids.append(token_id)
        reason, stop_reason = stop_after(sequence, self.max_len, is_complete=is_complete)
        if reason is not None:
            self.finish(sequence, reason, stop_reason)

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a sequence, wherever it is, and give its blocks back. Ending it twice changes nothing."""
        if sequence.status is Status.FINISHED:
            return
        queue = self.running if sequence.status is Status.RUNNING else self.waiting
        index = bisect.bisect_left(queue, sequence.order, key=_order)
        if index < len(queue) and queue[index] is sequence:  # unforked samples and some parked beams are in neither
            del queue[index]
        if reason is not FinishReason.ERROR:  # its newest tokens may have filled a block before they were known
            self.kv_cache_manager.publish(sequence, min(sequence.num_computed_tokens, len(sequence.token_ids)))
        self.kv_cache_manager.free(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason

    def finish_all(self, sequences: Iterable[Sequence], reason: FinishReason) -> None:
        for sequence in sequences:
            self.finish(sequence, reason)


def _add(output: SchedulerOutput, sequence: Sequence, num_tokens: int, end: int) -> None:
    """The step computes the sequence's next `num_tokens` tokens, which are those before position `end`."""
    output.scheduled.append(ScheduledSequence(sequence, num_tokens, _num_logits(sequence, end)))
    output.pools = output.pools or sequence.request.pooling is not None
    output.num_tokens += num_tokens


def _num_logits(sequence: Sequence, end: int) -> int:
    """How many of the next tokens before position `end` need logits: the last one of all, and what prompt
    log-probabilities take; none of them for an embedding."""
    request = sequence.request
    if request.pooling is not None:
        return 0
    first = None if request.prompt_logprobs is None else request.first_logits
    if first is None:
        return int(end >= len(sequence.token_ids))
    return max(0, end - max(sequence.num_computed_tokens, first))
